# SPDX-License-Identifier: Apache-2.0
"""Bounds of keys by pages of positions, made anew: what `PageBoundsIndex` keeps up."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.engine.page_index import enter_range
from tandemkv.cache_rank.policies.base import PageBounds


def page_bounds(
    keys: torch.Tensor,
    slots: torch.Tensor,
    lo: torch.Tensor,
    hi: torch.Tensor,
    *,
    page_tokens: int,
) -> PageBounds:
    """Return the bounds of the candidates ``[lo, hi)`` of each request.

    Parameters
    ----------
    keys : torch.Tensor
        ``[num_slots, H, D]``.
    slots : torch.Tensor
        ``[S, width]`` integers: slots by position.
    lo, hi : torch.Tensor
        ``[S]`` integers, on the host's side of things: their values are read.
    page_tokens : int
        Positions of a page.
    """
    width = slots.shape[1]
    num_pages = -(-width // page_tokens)
    shape = (len(slots), num_pages, *keys.shape[1:])
    low, high = keys.new_zeros(shape), keys.new_zeros(shape)
    for i, (first, last) in enumerate(zip(lo.tolist(), hi.tolist(), strict=True)):
        enter_range(keys, slots[i], first, last, low[i], high[i], page_tokens=page_tokens)
    return PageBounds(low, high, page_tokens)
