# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.pack`."""

import torch


def slot_of(slots: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the slots of positions ``[num_reqs, num_kv_heads, n]``, int64; of padding, any."""
    places = positions.clamp(min=0).long()
    page = slots.gather(1, (places // page_size).view(slots.shape[0], -1)).long()
    return page.view_as(places) * page_size + places % page_size


def gather_pack(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    fetch_pos: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    *,
    page_size: int = 1,
) -> None:
    """Gather rows; see `tandemkv.kernels.pack.gather_pack`."""
    is_padding = fetch_pos < 0
    if slots.shape[1] == 0 or bool(is_padding.all()):
        k_out.zero_()
        v_out.zero_()
        return
    num_kv_heads = fetch_pos.shape[1]
    slot = slot_of(slots, fetch_pos, page_size)
    slot.masked_fill_(is_padding, 0)  # what stands there need not be a slot
    head = torch.arange(num_kv_heads, device=slot.device)[:, None]
    for pool, out in ((k_pool, k_out), (v_pool, v_out)):
        if pool.is_contiguous() and out.is_contiguous():
            row = (slot * num_kv_heads + head).view(-1)
            torch.index_select(pool.view(-1, pool.shape[-1]), 0, row, out=out.view(row.numel(), -1))
        else:
            out.copy_(pool[slot, head])
        out.masked_fill_(is_padding.unsqueeze(-1), 0)
