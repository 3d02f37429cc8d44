# SPDX-License-Identifier: Apache-2.0
"""Fills the resident sets of requests that decode begins to select for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandemkv.cache_rank.protocol.engine import EnginePools
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.exchange import exchange_rows
from tandemkv.kernels.to_device import to_device

from .mirror import ResidentMirror
from .policy_calls import PolicyCalls
from .seeding import seed_range


class Seeder:
    """Writes whole sets: of prompts, chosen by their last queries, and of grown requests."""

    def __init__(self, pools: EnginePools, mirror: ResidentMirror) -> None:
        self._pools, self._mirror = pools, mirror
        self._num_heads, self._device = mirror.positions.shape[2], mirror.positions.device
        self._all_slots = torch.arange(mirror.num_resident, dtype=torch.int32, device=self._device)
        self._prompts: list[torch.Tensor] = []

    def begin_extend(self, tables: Sequence[torch.Tensor]) -> None:
        """Take note of a prefill step's requests; ``tables`` are their slots ``[length]``."""
        self._prompts = list(tables)

    def seed(
        self,
        layer: int,
        request: int,
        row: int,
        queries: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor | None],
        calls: PolicyCalls,
        *,
        book: int | None,
    ) -> torch.Tensor:
        """Fill the set of a finished prompt, as the policy ranks it.

        `request` is its place in its prefill step, ``queries [W, Hq, D]`` its last ones, `keys`
        keys and scales as `tandemkv.kernels.score.KeyScan` has them, and `book` the layer's.
        Returns ``[W]`` int64, the positions of `queries`.
        """
        slots = self._prompts[request]
        num_resident = self._mirror.num_resident
        chosen, positions = calls.seed(layer, row, queries, keys, slots, num_resident)
        if book is not None:
            self._mirror.seed(book, row, chosen)
        rows = to_device([row], slots.device)  # the host goes on with the layer's other kernels
        if self._pools.log_weight is not None:  # samples count once something is selected
            self._pools.log_weight[layer, row] = float("-inf")
        self._copy(layer, rows, slots[None], chosen[None])
        return positions

    def seed_identity(
        self, layers: Sequence[int], rows: torch.Tensor, tables: torch.Tensor | None
    ) -> None:
        """Make the first tokens of `rows` ``[n]`` resident; see `Engine.seed_identity`."""
        rows = rows.to(self._device)
        self._mirror.fill_identity(rows)
        if self._pools.log_weight is not None:
            self._pools.log_weight[:, rows] = float("-inf")
        if tables is None:
            return
        tables, shape = tables.to(self._device), (len(rows), self._num_heads, -1)
        positions = self._all_slots.expand(shape).contiguous()
        for layer in layers:
            self._copy(layer, rows, tables, positions)

    def refill(
        self,
        layers: Sequence[tuple[int, int]],
        rows: torch.Tensor,
        tables: torch.Tensor,
    ) -> None:
        """Bring to the sets of `rows` ``[n]`` what the books say is in them.

        ``layers`` are pairs of a layer and its book, ``tables [n, width]`` the slots by position.
        """
        for layer, book in layers:
            self._copy(layer, rows, tables, self._mirror.positions[book, rows])

    def seed_latest(
        self,
        layers: Sequence[tuple[int, int | None]],
        row: int,
        table: torch.Tensor,
        selection: SelectionSettings,
    ) -> None:
        """Make the sink and the latest candidates of `row` resident; ``table [length]``."""
        width = self._mirror.num_resident
        lo, hi = seed_range(len(table), selection)
        latest = torch.arange(max(lo, hi - (width - lo)), hi, dtype=torch.int32).flip(0)
        chosen = torch.full((width,), -1, dtype=torch.int32)
        chosen[:lo] = torch.arange(lo, dtype=torch.int32)
        chosen[lo : lo + len(latest)] = latest
        positions = chosen.to(self._device).expand(self._num_heads, -1).contiguous()
        rows = to_device([row], self._device)
        if self._pools.log_weight is not None:
            self._pools.log_weight[:, row] = float("-inf")
        for layer, book in layers:
            if book is not None:
                self._mirror.seed(book, row, positions)
            self._copy(layer, rows, table[None], positions[None])

    def _copy(
        self, layer: int, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> None:
        k_res, v_res = self._pools.resident[layer]
        if not k_res.shape[1]:
            return
        targets = torch.where(positions >= 0, self._all_slots, -1)
        exchange_rows(
            self._pools.k[layer], self._pools.v[layer], slots, positions, targets, k_res, v_res,
            rows, page_size=1,
        )  # fmt: skip
