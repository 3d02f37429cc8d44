# SPDX-License-Identifier: Apache-2.0
"""The embedded model: unpacked and converted."""
