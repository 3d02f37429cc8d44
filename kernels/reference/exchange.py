# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.exchange`."""

import torch

from tandemkv.kernels.exchange import SampleWeights
from tandemkv.kernels.reference.pack import slot_of


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
    pos_res: torch.Tensor | None = None,
    weights: SampleWeights | None = None,
    flag: torch.Tensor | None = None,
    num_done: torch.Tensor | None = None,
) -> None:
    """Copy rows; see `tandemkv.kernels.exchange.exchange_rows`."""
    is_copied = (fetch_pos >= 0) & (fetch_slot >= 0)
    if weights is not None:
        chosen = rows.long()[weights.active]
        weights.target[chosen] = weights.source[chosen]
    if flag is not None:
        flag.fill_(1)
    if not bool(is_copied.any()):
        return
    req, head, place = torch.nonzero(is_copied, as_tuple=True)
    position, to = fetch_pos[req, head, place], fetch_slot[req, head, place].long()
    source = slot_of(slots, fetch_pos, page_size)[req, head, place]
    row = rows.long()[req]
    k_res[row, to, head] = k_pool[source, head]
    v_res[row, to, head] = v_pool[source, head]
    if pos_res is not None:
        pos_res[row, head, to] = position
