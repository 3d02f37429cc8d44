# SPDX-License-Identifier: Apache-2.0
"""Bounds of keys by pages of positions: the least and the largest of each component."""

from __future__ import annotations

import torch

from .policies.base import PageBounds


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


def enter_range(
    keys: torch.Tensor,
    slots: torch.Tensor,
    first: int,
    last: int,
    low: torch.Tensor,
    high: torch.Tensor,
    *,
    page_tokens: int,
) -> None:
    """Write the bounds of one request's positions ``[first, last)``, whole pages at a time.

    ``slots [width]`` by position, ``low, high [num_pages, H, D]``. What the pages held before is
    forgotten.
    """
    if first >= last:
        return
    begin, end = first // page_tokens, -(-last // page_tokens)
    own = keys[slots[first:last].long()]  # [n, H, D]
    page = torch.arange(first, last, device=keys.device) // page_tokens - begin
    index = page[:, None, None].expand_as(own)
    for bounds, how in ((low, "amin"), (high, "amax")):
        bounds[begin:end].scatter_reduce_(0, index, own, reduce=how, include_self=False)
