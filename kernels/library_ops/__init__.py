# SPDX-License-Identifier: Apache-2.0
"""Operations on a GPU that a library does well: torch's fused attention."""
