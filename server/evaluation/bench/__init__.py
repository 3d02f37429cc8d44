# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each writes one report of rows, all in one form."""
