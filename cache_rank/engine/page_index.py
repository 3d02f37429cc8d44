# SPDX-License-Identifier: Apache-2.0
"""Bounds of the keys of each row's candidates, by pages of positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandemkv.cache_rank.policies.base import PageBounds
from tandemkv.cache_rank.protocol.engine import PADDING_ROW, EnginePools
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

from .key_index import KeyIndex
from .seeding import seed_range


class PageBoundsIndex(KeyIndex):
    """The least and the largest of each key component, for pages of `page_tokens` positions.

    Bounds are of candidates alone: neither sink nor recent tokens are in them. A prompt's are made
    whole with each of its chunks, from the pool, whatever part of it was stored before; then each
    step enters the one position that becomes a candidate with the next, so a replayed step writes
    the same again. `page_tokens` are the positions of a page. In each row there is memory for as
    many pages as the longest request (`max_context`) has; a CPU commits what is written.
    """

    def __init__(
        self,
        pools: EnginePools,
        layers: Sequence[int],
        selection: SelectionSettings,
        *,
        page_tokens: int,
        max_context: int,
    ) -> None:
        super().__init__(pools)
        self._selection, self._size = selection, page_tokens
        _, heads, dim = pools.k[0].shape
        shape = (2, pools.num_rows, -(-max_context // self._size), heads, dim)
        dtype, device = bounds_dtype(pools.k[0].dtype), pools.k[0].device
        self._bounds = {x: torch.zeros(shape, dtype=dtype, device=device) for x in layers}
        self._prompts: list[tuple[int, int, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """See `KeyIndex.nbytes`."""
        return sum(t.nbytes for t in self._bounds.values())

    def bounds(self, layer: int, width: int) -> PageBounds:
        """Return the bounds of all rows, for candidates in ``[0, width)``."""
        bounds = self._bounds[layer]
        return PageBounds(bounds, self._size, min(-(-width // self._size), bounds.shape[2]))

    def begin_extend(
        self,
        prefix_lens: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[torch.Tensor],
        rows: Sequence[int],
    ) -> None:
        """See `KeyIndex.begin_extend`."""
        self._prompts = list(zip(rows, lengths, tables, strict=True))

    def extend(self, layer: int, slots: torch.Tensor) -> None:
        """See `KeyIndex.extend`; what was stored before is read as well."""
        low, high = self._bounds[layer]
        for row, length, table in self._prompts:
            if row == PADDING_ROW:
                continue
            lo, hi = seed_range(length, self._selection)
            enter_range(
                self._pools.k[layer], table, lo, hi, low[row], high[row], page_tokens=self._size
            )

    def rebuild(self, layer: int) -> None:
        """See `KeyIndex.rebuild`; bounds are of requests, not of slots."""
        self.extend(layer, torch.empty(0, dtype=torch.int64))

    def append(
        self, layer: int, lengths: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """See `KeyIndex.append`; the position is that which is a candidate from the next step."""
        num_sink, page_size = self._selection.num_sink_tokens, self._pools.page_size
        position = lengths.long() - self._selection.num_recent_tokens
        is_candidate = position >= num_sink
        rows = torch.where(is_candidate, rows, PADDING_ROW)
        position = torch.where(is_candidate, position, num_sink)
        slots = pages.gather(1, (position // page_size)[:, None])[:, 0].long() * page_size
        keys = self._pools.k[layer].index_select(0, slots + position % page_size)  # [B, H, D]
        page, bounds = position // self._size, self._bounds[layer]
        is_first = (position % self._size == 0) | (position == num_sink)
        keys, before = keys.to(bounds.dtype), bounds[:, rows, page]
        new = torch.stack([torch.minimum(before[0], keys), torch.maximum(before[1], keys)])
        bounds[:, rows, page] = torch.where(is_first[:, None, None], keys, new)


def bounds_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the bounds of keys: one that holds them exactly, and has an order."""
    return torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype


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
    own = keys.index_select(0, slots[first:last]).to(low.dtype)  # [n, H, D]
    page = torch.arange(first, last, device=keys.device) // page_tokens - begin
    index = page[:, None, None].expand_as(own)
    for bounds, how in ((low, "amin"), (high, "amax")):
        bounds[begin:end].scatter_reduce_(0, index, own, reduce=how, include_self=False)
