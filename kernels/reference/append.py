# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.append`."""

import torch


def append_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
) -> None:
    """Write; see `tandemkv.kernels.append.append_tokens`."""
    k_res[rows.long(), slots.long()] = k
    v_res[rows.long(), slots.long()] = v
