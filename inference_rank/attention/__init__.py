# SPDX-License-Identifier: Apache-2.0
"""Decode over resident sets that an engine keeps fresh."""
