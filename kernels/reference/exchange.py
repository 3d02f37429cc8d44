# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.exchange`."""

import torch

from tandemkv.kernels.exchange import SampleWeights


def exchange_rows(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    fetch_pos: torch.Tensor,
    fetch_slot: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
    rows: torch.Tensor,
    *,
    page_size: int = 1,
    weights: SampleWeights | None = None,
) -> None:
    """Copy rows; see `tandemkv.kernels.exchange.exchange_rows`."""
    is_copied = (fetch_pos >= 0) & (fetch_slot >= 0)
    if weights is not None:
        chosen = rows.long()[weights.active]
        weights.target[chosen] = weights.source[chosen]
    if not bool(is_copied.any()):
        return
    req, head, place = torch.nonzero(is_copied, as_tuple=True)
    to = fetch_slot[req, head, place].long()
    source = _slot_of(slots, fetch_pos, page_size)[req, head, place]
    row = rows.long()[req]
    k_res[row, to, head] = k_pool[source, head]
    v_res[row, to, head] = v_pool[source, head]


def _slot_of(slots: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the slots of positions ``[num_reqs, num_kv_heads, n]``, int64; of padding, any."""
    places = positions.clamp(min=0).long()
    page = slots.gather(1, (places // page_size).view(slots.shape[0], -1)).long()
    return page.view_as(places) * page_size + places % page_size
