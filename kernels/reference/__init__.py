# SPDX-License-Identifier: Apache-2.0
"""Plain torch implementations: the CPU path, and what GPU kernels are tested against."""
