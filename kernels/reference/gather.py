# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.gather`."""

import torch


def gather_tokens(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """Copy tokens; see `tandemkv.kernels.gather.gather_tokens`."""
    for pool, out in ((k_pool, k_out), (v_pool, v_out)):
        out.view(torch.uint8).copy_(pool.view(torch.uint8)[slots.long()])
