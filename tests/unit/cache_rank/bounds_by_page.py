# SPDX-License-Identifier: Apache-2.0
"""Bounds of keys by pages of positions, made anew: what `PageBoundsIndex` keeps up."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.engine.page_index import enter_range
from tandemkv.cache_rank.policies.base import PageBounds


def page_bounds(
    keys: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
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
    rows, lo, hi : torch.Tensor
        ``[S]`` integers: row of each request, and its candidates. Their values are read.
    page_tokens : int
        Positions of a page.
    """
    num_pages = -(-slots.shape[1] // page_tokens)
    bounds = keys.new_zeros((2, int(rows.max()) + 1, num_pages, *keys.shape[1:]))
    ranges = zip(rows.tolist(), lo.tolist(), hi.tolist(), strict=True)
    for i, (row, first, last) in enumerate(ranges):
        enter_range(keys, slots[i], first, last, *bounds[:, row], page_tokens=page_tokens)
    return PageBounds(bounds, page_tokens, num_pages)
