# SPDX-License-Identifier: Apache-2.0
"""Compiled CPU kernels (Numba, an optional dependency) on NumPy arrays, without the GIL."""
