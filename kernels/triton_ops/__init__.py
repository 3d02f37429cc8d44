# SPDX-License-Identifier: Apache-2.0
"""Triton implementations, which operations of `tandemkv.kernels` call on CUDA devices."""
