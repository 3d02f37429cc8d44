# SPDX-License-Identifier: Apache-2.0
"""Triton implementations, used on CUDA devices in place of ``reference``."""
