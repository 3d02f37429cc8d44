# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.pack`."""

import torch


def gather_pack(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    fetch_pos: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """Gather rows; see `tandemkv.kernels.pack.gather_pack`."""
    is_padding = fetch_pos < 0
    if slots.shape[1] == 0 or bool(is_padding.all()):
        k_out.zero_()
        v_out.zero_()
        return
    num_reqs, num_kv_heads, cap = fetch_pos.shape
    positions = fetch_pos.clamp(min=0).view(num_reqs, -1).long()
    slot = slots.gather(1, positions).view(num_reqs, num_kv_heads, cap).long()
    slot.masked_fill_(is_padding, 0)  # what stands there need not be a slot
    head = torch.arange(num_kv_heads, device=slot.device)[:, None]
    for pool, out in ((k_pool, k_out), (v_pool, v_out)):
        if pool.is_contiguous() and out.is_contiguous():
            row = (slot * num_kv_heads + head).view(-1)
            torch.index_select(pool.view(-1, pool.shape[-1]), 0, row, out=out.view(row.numel(), -1))
        else:
            out.copy_(pool[slot, head])
        out.masked_fill_(is_padding.unsqueeze(-1), 0)
