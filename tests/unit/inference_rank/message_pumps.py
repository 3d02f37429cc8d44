# SPDX-License-Identifier: Apache-2.0
"""Link ``message`` in one process: a forward pass that is played, and pumps of both hosts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from shared_forward import Engines, Forward, settings_of
from tiny_model import CONFIG, write_model

from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes
from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.message.door import Door
from tandemkv.cache_rank.protocol.message.keys import (
    CACHE_RANK,
    INFERENCE_RANK,
    allowed_keys,
    make_keys,
    own_keys,
    public_key,
)
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.cache_rank.pump.far_service import FarPump
from tandemkv.cache_rank.pump.near_service import NearPump


class FarForward(Forward):
    """The K/V of earlier prompts are on the other host alone, or on several, each its heads."""

    pumps: Sequence[Pumps]

    def far_kv(self) -> torch.Tensor:
        return torch.cat([pumps.far._kept["kv"] for pumps in self.pumps], dim=3)

    def attended(self, layer: int, query: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        here, self.kept = self.kept, {"kv": self.far_kv()}  # type: ignore[assignment]
        try:
            return super().attended(layer, query, lengths)
        finally:
            self.kept = here


class Pumps:
    """Both pumps of a cache rank, as threads of this process, on two addresses of it."""

    def __init__(
        self, near: RunDir, far: RunDir, settings: RankSettings, keys: Path, rank: int = 0,
        far_rank: int | None = None, address: LinkAddress | None = None, homes: Homes | None = None,
    ) -> None:  # fmt: skip
        self._of_far = far, settings, keys, rank if far_rank is None else far_rank
        self._homes = homes
        self._running: list[tuple[threading.Event, threading.Thread]] = []
        self._address = address or LinkAddress("127.0.0.3", 0)
        if address is None:
            self._start_far()
        self.near = NearPump(
            near,
            settings,
            self._address,
            own_keys(keys, INFERENCE_RANK),
            public_key(keys, CACHE_RANK),
            rank=rank,
            homes=homes,
        )
        self._start(self.near)

    def lose_far(self) -> None:
        """End what holds the K/V, and start another at the same address."""
        self._stop(0)
        self._start_far()

    def close(self) -> None:
        while self._running:
            self._stop(0)

    def _start_far(self) -> None:
        far, settings, keys, rank = self._of_far
        door = Door(self._address, own_keys(keys, CACHE_RANK), allowed_keys(keys))
        self._address, self.far = door.address, FarPump(far, settings, door, rank, self._homes)
        self._start(self.far)

    def _start(self, pump: FarPump | NearPump) -> None:
        stop = threading.Event()
        self._running.append((stop, threading.Thread(target=pump.run, args=(stop,))))
        self._running[-1][1].start()

    def _stop(self, number: int) -> None:
        stop, thread = self._running.pop(number)
        stop.set()
        thread.join()


@contextmanager
def far_played(
    folder: Path, settings: RankSettings, config: Mapping[str, Any] = CONFIG
) -> Iterator[tuple[FarForward, Engines]]:
    """Yield a forward pass between two hosts, and the engines of its last cache rank."""
    near, far = RunDir.create(folder / "near"), RunDir.create(folder / "far")
    model_dir, keys = write_model(folder / "model", config), folder / "keys"
    make_keys(keys)
    engines, pumps = list[Engines](), list[Pumps]()
    try:
        for rank in range(settings.placement.head_shards):
            here, there = (x.of_rank(rank, create=True) for x in (near, far))
            engines.append(Engines(there, model_dir, settings, rank))
            pumps.append(Pumps(here, there, settings, keys, rank))
        played = FarForward(near, model_dir, settings)
        played.pumps = pumps
        yield played, engines[-1]
        played.connection.close()
        played.kept.close()
    finally:
        for each in (*pumps, *engines):
            each.close()


def check_same(found: list[list[torch.Tensor]], want: list[list[torch.Tensor]]) -> None:
    """Of each step, tensor by tensor, to the bit."""
    assert len(found) == len(want)
    for number, (mine, theirs) in enumerate(zip(found, want, strict=True)):
        for layer, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(a, b), f"step {number}, tensor {layer}"


def by_link_shared(
    folder: Path,
    policy: str,
    *,
    two_gpus: bool = True,
    config: Mapping[str, Any] = CONFIG,
    **selection: object,
) -> list[list[torch.Tensor]]:
    """Return what is attended to with link ``shared``, laid out for two GPUs or for one."""
    settings = settings_of(policy, {"two_gpus": two_gpus}, **selection)
    run_dir, model_dir = (
        RunDir.create(folder / "shared"),
        write_model(folder / "shared_model", config),
    )
    engines = Engines(run_dir, model_dir, settings)
    try:
        played = Forward(run_dir, model_dir, settings)
        found = played.run()
        played.connection.close()
        played.kept.close()
    finally:
        engines.close()
    return found
