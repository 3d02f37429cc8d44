# SPDX-License-Identifier: Apache-2.0
"""Decode over resident sets that an in-process cache rank keeps (``--cache-ranks 0``)."""
