# SPDX-License-Identifier: Apache-2.0
"""Building of the attention backend, and what is measured at start."""
