# SPDX-License-Identifier: Apache-2.0
"""The keys that selection scans: the pool's own, or a quantised copy of them.

A copy is made page by page where its scales span pages (int4), token by token otherwise
(int8). It follows the pool by position: whatever is a candidate was written, and then
indexed, since its slot was last given away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tandemkv.cache_rank.protocol.engine import EnginePools
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.kernels.quantize import append_int4, append_int8, quantize_int4_pages

_MIN_INT4_PAGE = 16
_AT_ONCE = 1 << 16
"""Slots that are indexed in one call when all are: its scratch is some times their keys."""


class KeyIndex:
    """Keys of the selecting layers, by slot: here the pool itself, to which nothing is to be done.

    Prefill calls may read sizes on the host. A copy may have a part of the channels: `channels` are
    those of each head by layer, ``[H, R]`` int64; a layer that is missing has all.
    """

    def __init__(
        self, pools: EnginePools, channels: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        self._pools = pools
        device = pools.k[0].device
        self._channels = {layer: kept.to(device) for layer, kept in (channels or {}).items()}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By layer: what its keys are kept as, and the scales of that."""

    @property
    def nbytes(self) -> int:
        """Bytes beside the pool."""
        return sum(tensor.nbytes for pair in self._copies.values() for tensor in pair)

    def keys(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys and scales, as `tandemkv.kernels.score.KeyScan` has them."""
        return self._copies.get(layer, (self._pools.k[layer], None))

    def seed_keys(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys and scales with all channels, for the last queries of a prompt: the pool's or ours.

        They are scanned once in a request, and its first steps rest on what they choose.
        """
        return (self._pools.k[layer], None) if layer in self._channels else self.keys(layer)

    def channels(self, layer: int) -> torch.Tensor | None:
        """Channels ``[H, R]`` int64 that `keys` have of each head; None: all."""
        return self._channels.get(layer)

    def _num_channels(self, layer: int) -> int:
        channels = self.channels(layer)
        return int(self._pools.k[layer].shape[2] if channels is None else channels.shape[1])

    def begin_extend(
        self,
        prefix_lens: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[torch.Tensor],
        rows: Sequence[int],
    ) -> None:
        """Take note of the requests of a prefill step."""

    def extend(self, layer: int, slots: torch.Tensor) -> None:
        """Index what a prefill step wrote at `slots` ``[n]``."""

    def rebuild(self, layer: int) -> None:
        """Index all that is stored, behind `begin_extend` with all requests that there are.

        Slots are indexed whether anything of use is in them or not: a prefix that no request has
        now may be reused.
        """

    def append(
        self, layer: int, lengths: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Index the newest token of each request.

        ``lengths, rows [B]``, ``pages [B, max_pages]``.
        """


class Int8Index(KeyIndex):
    """Int8 with one scale per token and head."""

    def __init__(
        self, pools: EnginePools, layers: Sequence[int], channels: Mapping[int, torch.Tensor]
    ) -> None:
        super().__init__(pools, channels)
        device, shape = pools.k[0].device, (pools.num_slots, pools.k[0].shape[1])
        for layer in layers:
            sizes = (*shape, self._num_channels(layer))
            codes = torch.zeros(sizes, dtype=torch.int8, device=device)
            self._copies[layer] = codes, torch.ones(shape, device=device)

    def extend(self, layer: int, slots: torch.Tensor) -> None:
        """See `KeyIndex.extend`."""
        append_int8(self._pools.k[layer], slots, *self._copies[layer], self.channels(layer))

    def rebuild(self, layer: int) -> None:
        """See `KeyIndex.rebuild`."""
        every = torch.arange(self._pools.num_slots, device=self._pools.k[layer].device)
        for slots in every.split(_AT_ONCE):
            self.extend(layer, slots)

    def append(
        self, layer: int, lengths: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """See `KeyIndex.append`."""
        last = lengths.long() - 1
        page_size = self._pools.page_size
        page = pages.gather(1, (last // page_size)[:, None])[:, 0]
        self.extend(layer, page.long() * page_size + last % page_size)


class Int4Index(KeyIndex):
    """Int4 with scale and zero per channel over the tokens of a page.

    Raises `SettingsError` if pages are too short to share scales.
    """

    def __init__(
        self, pools: EnginePools, layers: Sequence[int], channels: Mapping[int, torch.Tensor]
    ) -> None:
        super().__init__(pools, channels)
        if pools.page_size < _MIN_INT4_PAGE:
            raise SettingsError(
                f"index_dtype=int4 shares its scales over the tokens of a page, page_size="
                f"{pools.page_size} is too short: use pages of 64 (cuda), or --index-dtype int8"
            )
        heads, device = pools.k[0].shape[1], pools.k[0].device
        num_pages = pools.num_slots // pools.page_size
        for layer in layers:
            dim = self._num_channels(layer)
            codes = (num_pages, heads, pools.page_size, dim // 2)
            scales = (num_pages, heads, 2, dim)
            self._copies[layer] = (
                torch.zeros(codes, dtype=torch.uint8, device=device),
                torch.zeros(scales, dtype=torch.float16, device=device),
            )
        self._pages = torch.empty(0, dtype=torch.int32, device=device)

    def begin_extend(
        self,
        prefix_lens: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[torch.Tensor],
        rows: Sequence[int],
    ) -> None:
        """Find the pages that the step completes."""
        size = self._pools.page_size
        done = [
            table[: length // size * size : size][prefix // size :] // size
            for prefix, length, table in zip(prefix_lens, lengths, tables, strict=True)
        ]
        self._pages = torch.cat(done).to(torch.int32)

    def extend(self, layer: int, slots: torch.Tensor) -> None:
        """See `KeyIndex.extend`."""
        if self._pages.numel():
            self._quantize(layer, self._pages)

    def rebuild(self, layer: int) -> None:
        """See `KeyIndex.rebuild`."""
        size, device = self._pools.page_size, self._pools.k[layer].device
        every = torch.arange(self._pools.num_slots // size, dtype=torch.int32, device=device)
        for pages in every.split(max(1, _AT_ONCE // size)):
            self._quantize(layer, pages)

    def append(
        self, layer: int, lengths: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """See `KeyIndex.append`; only a token that completes a page is indexed, with the page."""
        keys, copies = self._pools.k[layer], self._copies[layer]
        append_int4(keys, pages, lengths, *copies, self.channels(layer))

    def _quantize(self, layer: int, pages: torch.Tensor) -> None:
        keys, copies = self._pools.k[layer], self._copies[layer]
        quantize_int4_pages(keys, pages, *copies, self.channels(layer))


def make_key_index(
    index_dtype: str,
    pools: EnginePools,
    layers: Sequence[int],
    channels: Mapping[int, torch.Tensor],
) -> KeyIndex:
    """Build the index of keys of `layers` in the precision asked for.

    `channels` are those of a copy, as for `KeyIndex`.
    """
    if index_dtype == "int8":
        return Int8Index(pools, layers, channels)
    if index_dtype == "int4":
        return Int4Index(pools, layers, channels)
    return KeyIndex(pools)
