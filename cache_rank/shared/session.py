# SPDX-License-Identifier: Apache-2.0
"""One epoch of the engine's process, on the memory that the inference rank handed over."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import replace
from pathlib import Path

import torch

from tandemkv.cache_rank.counters import BusyClock
from tandemkv.cache_rank.in_process.factory import create
from tandemkv.cache_rank.model_adapters.registry import find_adapter
from tandemkv.cache_rank.policies.registry import find_policy
from tandemkv.cache_rank.protocol.descriptor_socket import wait_for_hang_up
from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.cache_rank.protocol.fault_points import reach
from tandemkv.cache_rank.protocol.local import LocalCacheRank, PredictQuery
from tandemkv.cache_rank.protocol.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings import RankSettings
from tandemkv.cache_rank.protocol.shared_region import (
    FlagIndex,
    RegionSizes,
    check_region,
    pools_of,
)
from tandemkv.cache_rank.protocol.step_flags import StepFlags
from tandemkv.cache_rank.protocol.step_ring import StepRing

from .entry_runner import EntryRunner, StepAbortedError
from .row_versions import RowVersions


class SharedSession:
    """An engine on memory that the inference rank made, and the steps that it is asked for.

    Parameters
    ----------
    epoch : int
        Its number.
    model, settings, model_dir, sizes
        Agreed on in the handshake.
    connection : socket.socket
        Ends with the inference rank.
    tensors : MappedTensors
        Made by the inference rank; closed with the session.

    Attributes
    ----------
    made : MappedTensors
        What the engine made, for the inference rank to hold.

    Raises
    ------
    ProtocolError
        If the tensors are not those that were agreed on.
    """

    def __init__(
        self,
        *,
        epoch: int,
        model: ModelSpec,
        settings: RankSettings,
        model_dir: Path,
        sizes: RegionSizes,
        connection: socket.socket,
        tensors: MappedTensors,
        clock: BusyClock,
    ) -> None:
        selection = settings.selection
        check_region(tensors, model, selection, sizes)
        self.number, self._clock = epoch, clock
        self._connection, self._tensors, self.made = connection, tensors, MappedTensors()
        pools = replace(pools_of(tensors, model, selection, sizes), allocate=self.made.allocate)
        self.engine: LocalCacheRank = create(
            model=model,
            settings=settings,
            pools=pools,
            max_batch=sizes.max_batch,
            predict_query=_predictor(model, settings, model_dir) or _predicts_nothing,
            model_dir=model_dir,
        )
        flags, at = StepFlags(tensors["flags"]), FlagIndex(model.num_layers)
        self._ring = StepRing(tensors["ring"], flags, announced=at.ANNOUNCED, consumed=at.CONSUMED)
        names = ("resident_positions", "resident_last_used")
        books = {name: self.made[name] for name in names if self.engine.program.selects}
        self._over = threading.Event()
        self._runner = EntryRunner(
            self.engine,
            tensors,
            flags,
            RowVersions(books, self.made.allocate) if books else None,
            epoch=epoch,
            num_layers=model.num_layers,
            num_resident=selection.num_resident,
            is_over=self._over.is_set,
            clock=clock,
        )
        self.num_steps = 0
        self._wake, self._waker = socket.socketpair()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether the inference rank is gone, or `abort` was called."""
        return self._over.is_set()

    def abort(self) -> None:
        """End the step under way, if any. Safe from any thread."""
        self._over.set()

    def run_next(self, timeout_s: float) -> bool:
        """Do the next announced step; False if none comes within `timeout_s`, or all is over."""
        entry = self._ring.read(timeout_s=timeout_s, is_over=self._over.is_set)
        if entry is None or self._over.is_set():
            return False
        with self._clock.working():
            reach("cache_rank.step")
            try:
                self._runner.run(entry)
            except StepAbortedError:
                return False
        self.num_steps += 1
        return True

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._over.set()
        self._waker.close()
        self._connection.close()
        self._tensors.close()
        self.made.close()

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed by us meanwhile
            wait_for_hang_up(self._connection, self._wake)
        self._over.set()


def _predictor(model: ModelSpec, settings: RankSettings, model_dir: Path) -> PredictQuery | None:
    """Return a prediction with the checkpoint's weights; None if no query is predicted."""
    policy = find_policy(settings.selection.policy)
    if policy.capabilities.timing is not Timing.SAME_STEP_HIDDEN:
        return None
    exact = settings.selection.exact_layer_ids
    layers = [layer for layer in range(model.num_layers) if layer not in exact]
    return find_adapter(model.architecture)(model_dir, model, layers=layers).predict_query


def _predicts_nothing(layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    raise ContractError(f"layer {layer}: this policy predicts no query")
