# SPDX-License-Identifier: Apache-2.0
"""One epoch of the engine's process, on the memory that the inference rank handed over."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from tandemkv.cache_rank.engine.factory import create
from tandemkv.cache_rank.policies.registry import find_policy
from tandemkv.cache_rank.protocol.engine import Allocate, Engine, PredictQuery, measure_selection
from tandemkv.cache_rank.protocol.errors import (
    ContractError,
    ProtocolError,
    UnusableBooksError,
)
from tandemkv.cache_rank.protocol.fault_points import reach
from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.memory.descriptor_socket import wait_for_hang_up
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import RegionSizes, pools_of
from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.models.predictor_weights import MappedPredictor
from tandemkv.cache_rank.protocol.progress import BusyClock
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.cache_rank.protocol.step_flags import StepFlags
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepRing
from tandemkv.cache_rank.protocol.step_trace import tracer
from tandemkv.kernels.streams import FORWARD_PRIORITY, shared_stream

from .entry_runner import EntryRunner
from .polled_signals import PolledSignals
from .row_versions import RowVersions
from .signals import HostSignals, StepAbortedError
from .stream_signals import StreamSignals

_VERSIONED = ("resident_positions", "resident_last_used")
"""What a step that is done twice would change twice. Other tensors by row hold the same after a
second time: windows of queries are rings by position, a policy's own tensors are made so."""
_AWAKE_S = 0.1
"""After a decode step on a GPU this thread has nothing to do but look for the next one, which comes
within a step or not soon."""


class SharedSession:
    """An engine on memory that the inference rank made, and the steps that it is asked for.

    It ends with the inference rank's `connection`. `tensors`, which that has made, and `made` are
    closed with it: what the engine remembers of rows, for the inference rank to hold. `made` has
    what the engine of an earlier epoch made, and gets the rest. Weights of the prediction are of
    the heads of `shard`. Raises `UnusableBooksError` if an engine like this one makes something
    else; all of the arguments are the caller's then.
    """

    def __init__(
        self,
        *,
        epoch: int,
        model: ModelSpec,
        settings: RankSettings,
        model_dir: Path,
        sizes: RegionSizes,
        shard: HeadShard,
        connection: socket.socket,
        tensors: MappedTensors,
        made: MappedTensors,
        clock: BusyClock,
    ) -> None:
        self.number, self._made, self._clock = epoch, made, clock
        self._connection, self._tensors = connection, tensors
        self._over, flags = threading.Event(), StepFlags(tensors["flags"])
        self._on_gpu: StreamSignals | None = None
        self._make_engine(model, settings, model_dir, sizes, shard, flags)
        self._ring = StepRing(tensors["ring"], flags)
        self._stream = shared_stream(tensors.homes.here, FORWARD_PRIORITY)
        if self._stream is not None:  # steps come behind what was queued to make all of this
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self.num_steps, self._awake_until = 0, 0.0
        self._tracer = tracer(sizes.shard.index, tensors.homes.here)
        self._wake, self._waker = socket.socketpair()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def _make_engine(
        self,
        model: ModelSpec,
        settings: RankSettings,
        model_dir: Path,
        sizes: RegionSizes,
        shard: HeadShard,
        flags: StepFlags,
    ) -> None:
        """Make the engine, which takes what there is of `made` and makes the rest; and its runner.

        Raises `UnusableBooksError` if something of `made` is left over, or is of another shape.
        """
        tensors, made, selection = self._tensors, self._made, settings.selection
        unknown = {spec.name for spec in made.specs}

        def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            unknown.discard(name)
            try:
                return made.allocate(name, shape, dtype)
            except ProtocolError as error:
                raise UnusableBooksError(str(error)) from error

        pools = replace(pools_of(tensors, model, selection, sizes), allocate=allocate, shard=shard)
        predict = _predictor(tensors, model, settings, shard)
        self.engine: Engine = create(
            model=model,
            settings=settings,
            pools=pools,
            max_batch=sizes.max_batch,
            predict_query=predict,
            model_dir=model_dir,
        )
        first = next(iter(self.engine.program.selecting), 0)
        self.runner = EntryRunner(
            self.engine,
            tensors,
            self._make_signals(flags, settings.exchange.transfer_timeout_s, sizes.shard.index),
            self._versions(pools.log_weight, allocate),
            epoch=self.number,
            num_resident=selection.num_resident,
            is_gone=self._over.is_set,
            host=flags,
            warm_up=lambda: _load_kernels(
                model, settings, sizes, predict, first, tensors.homes.here, model_dir
            ),
        )
        if unknown:  # only the engine and its policy know what they keep
            raise UnusableBooksError(
                f"mapped tensor {min(unknown)!r} is nothing that this engine keeps; start both "
                "ranks with the same settings"
            )

    def _make_signals(
        self, flags: StepFlags, limit_s: float, index: int
    ) -> HostSignals | StreamSignals:
        """Return what waits for the inference rank: the GPU's streams, or this thread."""
        tensors, num_layers = self._tensors, self.engine.program.num_layers
        if tensors.homes.host_engine:
            return PolledSignals(
                tensors, flags, num_layers, is_gone=self._over.is_set, clock=self._clock
            )
        if tensors.homes.are_on_gpu:
            self._on_gpu = StreamSignals(
                tensors, flags, num_layers, timeout_s=limit_s, index=index,
                is_far=self.engine.program.tells_all,
            )  # fmt: skip
            return self._on_gpu
        return HostSignals(
            flags,
            num_layers,
            is_gone=self._over.is_set,
            clock=self._clock,
            remote_outputs=tensors.get("remote_outputs"),
        )

    def _versions(self, log_weight: torch.Tensor | None, allocate: Allocate) -> RowVersions | None:
        """Return what a step that is cut short is done again from; None if nothing is selected."""
        if not self.engine.program.selects:
            return None
        books = {name: self._made[name] for name in _VERSIONED}
        if log_weight is not None:
            books["sample_log_weight"] = log_weight
        return RowVersions(books, allocate)

    @property
    def is_over(self) -> bool:
        """Whether the inference rank is gone, or `abort` was called."""
        return self._over.is_set()

    def abort(self) -> None:
        """End the step under way, if any. Safe from any thread."""
        self._over.set()
        if self._on_gpu is not None:
            self._on_gpu.abort()

    def stream(self) -> AbstractContextManager[None]:
        """Return what makes the engine's stream the current one, as `run_next` requires."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def run_next(self, timeout_s: float) -> bool:
        """Do the next announced step; False if none comes within `timeout_s`, or all is over."""
        if self._tracer is not None:
            next(self._tracer)
        entry = self._ring.read(
            timeout_s=timeout_s, is_over=self._over.is_set, awake_until=self._awake_until
        )
        if entry is None or self._over.is_set():
            return False
        # Nobody waits for a rehearsal, which may have to compile, as for a step.
        is_awaited = entry.kind not in (EntryKind.PREPARE, EntryKind.RESUME)
        if is_awaited:
            self._clock.begin()
        try:
            reach("cache_rank.step")
            self.runner.run(entry)
        except StepAbortedError:
            return False
        finally:
            self._clock.end()
        self.num_steps += entry.kind in (EntryKind.EXTEND, EntryKind.DECODE)
        if self._on_gpu is not None and entry.kind is EntryKind.DECODE:
            self._awake_until = time.monotonic() + _AWAKE_S
        return True

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self.abort()
        self._waker.close()
        try:
            self._tensors.close()
            self._made.close()
        finally:
            self._connection.close()  # tells the inference rank that nothing of this is written

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed by us meanwhile
            wait_for_hang_up(self._connection, self._wake)
        self.abort()


def _predictor(
    tensors: MappedTensors, model: ModelSpec, settings: RankSettings, shard: HeadShard
) -> PredictQuery:
    """Return a prediction with the weights that the inference rank has put beside the engine."""
    policy = find_policy(settings.selection.policy)
    if policy.capabilities.timing is not Timing.SAME_STEP_HIDDEN:
        return _predicts_nothing
    return MappedPredictor(tensors, model.num_layers, model.num_qo_heads, shard)


def _predicts_nothing(layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    raise ContractError(f"layer {layer}: this policy predicts no query")


def _load_kernels(
    model: ModelSpec,
    settings: RankSettings,
    sizes: RegionSizes,
    predict: PredictQuery,
    layer: int,
    device: torch.device,
    model_dir: Path,
) -> None:
    """Load the kernels of prompts of each length, on a small engine that is dropped again.

    Compiling holds the host up for longer than the other process's GPU may wait for a step.
    """
    measure_selection(
        model=model,
        settings=settings,
        num_slots=sizes.num_slots,
        page_size=sizes.page_size,
        max_batch=sizes.max_batch,
        device=device,
        predict_query=lambda _, hidden, positions: predict(layer, hidden, positions),
        model_dir=model_dir,
    )
    torch.cuda.empty_cache()
