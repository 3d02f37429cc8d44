# SPDX-License-Identifier: Apache-2.0
"""``tandemkv inspect``: what each layer and head attends to over time, as one HTML page."""
