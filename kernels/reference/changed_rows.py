# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.changed_rows`."""

import torch


def take_changed_rows(
    positions: torch.Tensor,
    sent: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
    rows: torch.Tensor,
    active: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Fill the buffer; see `tandemkv.kernels.changed_rows.take_changed_rows`."""
    index = rows.long()
    now = positions[index]
    differs = (now != sent[index]) & active[:, None, None]
    place = differs.cumsum(-1) - 1
    req, head, slot = (differs & (place < slots.shape[2])).nonzero(as_tuple=True)
    to = place[req, head, slot]
    slots.fill_(-1)
    slots[req, head, to] = slot.int()
    for out, sets in ((k, k_res), (v, v_res)):
        out[req, head, to] = sets[index[req], slot, head]
    sent[index[req], head, slot] = now[req, head, slot]


def put_changed_rows(
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    k_res: torch.Tensor,
    v_res: torch.Tensor,
) -> None:
    """Empty the buffer; see `tandemkv.kernels.changed_rows.put_changed_rows`."""
    req, head, place = (slots >= 0).nonzero(as_tuple=True)
    slot, row = slots[req, head, place].long(), rows.long()[req]
    for sets, found in ((k_res, k), (v_res, v)):
        sets[row, slot, head] = found[req, head, place]
