# SPDX-License-Identifier: Apache-2.0
"""Build the attention backend of an inference rank whose engine is in another process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tandemkv.cache_rank.protocol.engine import DenseLengths
from tandemkv.cache_rank.protocol.head_shard import parts_of
from tandemkv.cache_rank.protocol.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.predictor_weights import put_weights
from tandemkv.cache_rank.protocol.settings import RankSettings
from tandemkv.inference_rank import runtime as runtime_module
from tandemkv.inference_rank.attention.backend import ResidentBackend
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.links.connection import SharedConnection, limit_s
from tandemkv.inference_rank.links.pool import rank_run_dir
from tandemkv.inference_rank.links.query_predictor import LiveQueryPredictor
from tandemkv.inference_rank.links.sharded import ShardedConnection, host_signals, make_connection
from tandemkv.inference_rank.links.shared import SharedLink
from tandemkv.inference_rank.links.signals import LinkSignals, StreamSignals
from tandemkv.inference_rank.occupancy import Occupancy
from tandemkv.inference_rank.query_checkpoint import checkpoint_of
from tandemkv.inference_rank.resume.agreement import tensor_parallel
from tandemkv.inference_rank.resume.passes import PassLog
from tandemkv.inference_rank.resume.penalties import PenaltyLog
from tandemkv.inference_rank.resume.recovery import Recovery, State

from .local import (
    attention_probe,
    dense_steps,
    full_backend,
    local_model_spec,
    make_home,
    refresh_for,
)


@dataclass(slots=True, kw_only=True)
class SharedRuntime(runtime_module.Runtime):
    """What the plugin's hooks find in a process whose engine is another process."""

    client: SharedConnection | ShardedConnection
    mapped_bytes: int
    req_to_token_pool: Any
    penalties: PenaltyLog = field(default_factory=PenaltyLog)
    passes: PassLog = field(init=False)
    recovery: Recovery = field(init=False)
    measurement: None = None
    """A selection is timed in the process that makes it."""
    _flushed: int = 0

    def follow(self, link: SharedLink, backend: ResidentBackend) -> None:
        """Follow the passes of `backend`, so that lost ones can be done again."""
        agreement = tensor_parallel()
        self.passes = PassLog(self.client, link, backend, self.counters, agreement)
        self.recovery = Recovery(
            self.client,
            self.passes,
            self.penalties,
            self.counters,
            generation_of=self.generation,
            num_cold=backend.num_cold,
            refill=backend.refill,
            timeout_s=self.settings.exchange.recovery_timeout_s,
            agreement=agreement,
        )

    def generation(self, row: int) -> int:
        """Identity of the present tenant of `row`; SGLang's own counter restarts at a flush."""
        return self._flushed + int(self.req_to_token_pool.req_generation[row])

    def before_flush(self) -> None:
        """Go on above all counts that SGLang is about to reset."""
        self._flushed += int(self.req_to_token_pool.req_generation.max())

    def status(self) -> StatusReply:
        """Answer a `StatusRequest`."""
        selection = self.settings.selection
        dense = DenseLengths.of(selection, selection.num_resident)
        own = {
            "cache_rank_up": float(self.recovery.state is State.SERVING),
            "pause_s": self.recovery.pause_s,
            "mapped_bytes": float(self.mapped_bytes + self.client.epoch_bytes),
            "plan_refresh_steps": float(selection.refresh_steps),
            "plan_dense_tokens": float(dense.num_dense),
        }
        told = {
            "lost_reason": self.client.lost_reason or "",
            "state": "no cache rank" if self.recovery.is_down else self.recovery.state.value,
            "plan_placement": "a process of its own, in shared memory"
            + (", on a second GPU" if self.settings.placement.has_far_pool else ""),
            "plan_note": "not measured in another process; see exchange_wait_us_total",
        }
        return StatusReply(
            role="inference_rank",
            epoch=self.client.epoch,
            ready=not self.recovery.is_down,
            values=self.values() | own,
            info=self.info() | told,
        )


def create_shared_backend(runner: Any, settings: RankSettings) -> ResidentBackend:
    """Create the backend, and open the first epoch with the engine's process.

    Raises
    ------
    SettingsError, UnsupportedModelError, CacheRankError, ContractError
        The server must not start.
    """
    device, model, pool = (
        torch.device(runner.device),
        local_model_spec(runner),
        runner.token_to_kv_pool,
    )
    home = make_home(runner, settings, model, device)
    counters = Counters()
    connection = _connection(settings, model, pool, counters)
    if settings.selection.declared.predicts_from_hidden:
        _put_predictor(runner, settings, model, pool.mapped)
    connection.connect()
    runtime = SharedRuntime(
        settings=settings,
        model=model,
        client=connection,
        counters=counters,
        resident_bytes=home.nbytes,
        mapped_bytes=pool.mapped.nbytes,
        occupancy=Occupancy(runner),
        req_to_token_pool=runner.req_to_token_pool,
        refresh=refresh_for(runner, settings.selection),
    )
    selection = settings.selection
    homes, is_far = pool.mapped.homes, settings.placement.has_far_pool
    link = SharedLink(
        connection,
        _signals(connection, settings, model),
        model,
        generation_of=runtime.generation,
        rows_on_host=lambda: runtime.rows_on_host,
        pool=pool,
    )
    link.hook(runner.model)
    backend = ResidentBackend(
        runner,
        full_backend(runner),
        link,
        home,
        cache_device=homes.engine if is_far else device,
        is_far=is_far,
        seed_window=selection.seed_window,
        dense=dense_steps(selection),
        num_resident=selection.num_resident,
        runtime=runtime,
        probe=attention_probe(runner, settings, model, home, link),
    )
    runtime.follow(link, backend)
    runtime_module.set_current(runtime)
    return backend


def _connection(
    settings: RankSettings, model: ModelSpec, pool: Any, counters: Counters
) -> SharedConnection | ShardedConnection:
    """Return what leads to the cache rank, or to the several that share the KV heads."""
    shards = parts_of(settings.placement.head_shards)
    return make_connection(
        run_dirs=[rank_run_dir(shard) for shard in shards],
        settings=settings,
        model=model,
        sizes=pool.mapped_sizes,
        kept=pool.mapped,
        counters=counters,
    )


def _signals(
    connection: SharedConnection | ShardedConnection, settings: RankSettings, model: ModelSpec
) -> LinkSignals:
    """Return flags and staging, on a CPU or a GPU."""
    layers, is_far = model.num_layers, settings.placement.has_far_pool
    if isinstance(connection, ShardedConnection) or not connection.tensors.homes.are_on_gpu:
        return host_signals(connection, layers, sends_beside=is_far)
    limit = limit_s(settings.exchange)
    return StreamSignals(connection, layers, timeout_s=limit, sends_beside=is_far)


def _put_predictor(
    runner: Any, settings: RankSettings, model: ModelSpec, mapped: MappedTensors
) -> None:
    """Put the weights that predict queries where the engine reads them."""
    predictor = LiveQueryPredictor(
        runner.model,
        num_qo_heads=model.num_qo_heads,
        head_dim=model.head_dim,
        device=torch.device(runner.device),
        is_int8=settings.selection.predictor_dtype_of(on_peer_gpu=settings.placement.has_far_pool)
        == "int8",
        dtype=runner.dtype,
        checkpoint=checkpoint_of(runner),
        skipped=model.windowed_layers,
    )
    predictor.load()
    put_weights(mapped, *predictor.weights())
