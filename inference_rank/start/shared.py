# SPDX-License-Identifier: Apache-2.0
"""Build the attention backend of an inference rank whose engine is in another process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tandemkv.cache_rank.protocol.engine import DenseLengths
from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.cache_rank.protocol.models.predictor_weights import num_positions, put_weights
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.inference_rank import runtime as runtime_module
from tandemkv.inference_rank.attention.backend import ResidentBackend
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.links.connection import SharedConnection
from tandemkv.inference_rank.links.patience import limit_s
from tandemkv.inference_rank.links.pool import rank_run_dir
from tandemkv.inference_rank.links.sharded import ShardedConnection, make_connection
from tandemkv.inference_rank.links.shared import SharedLink
from tandemkv.inference_rank.links.signals import HostSignals, StreamSignals
from tandemkv.inference_rank.resume.agreement import Agreement
from tandemkv.inference_rank.resume.passes import PassLog
from tandemkv.inference_rank.resume.penalties import PenaltyLog
from tandemkv.inference_rank.resume.recovery import Recovery, State
from tandemkv.inference_rank.sglang import versions as sglang_versions
from tandemkv.inference_rank.sglang.pool import Occupancy

from .local import (
    backend_of,
    live_predictor,
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
        agreement = Agreement(sglang_versions.tensor_group())
        self.passes = PassLog(self.client, link, backend, self.counters, agreement)
        self.recovery = Recovery(
            self.client,
            self.passes,
            self.penalties,
            self.counters,
            generation_of=self.generation,
            num_cold=backend.num_cold,
            refill=backend.refill,
            note_seeded=backend.note_seeded,
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
            "mapped_bytes": float(self.mapped_bytes + sum(x.own_bytes for x in self.client.parts)),
            "plan_refresh_steps": float(selection.most_steps_between),
            "plan_dense_tokens": float(dense.num_dense),
        }
        told = {
            "lost_reason": self.client.lost_reason or "",
            "state": "no cache rank" if self.recovery.is_down else self.recovery.state.value,
            "plan_placement": _place(self.settings),
            "plan_note": "not timed in another process; status has the time of waits for it",
        }
        is_ready = not self.recovery.is_down
        return self.reply(epoch=self.client.epoch, ready=is_ready, values=own, info=told)


def create_shared_backend(runner: Any, settings: RankSettings) -> ResidentBackend:
    """Create the backend, and open the first epoch with the engine's process.

    Raises `SettingsError`, `UnsupportedModelError`, `CacheRankError` or `ContractError`: the server
    must not start.
    """
    device, model = torch.device(runner.device), local_model_spec(runner)
    pool, selection = runner.token_to_kv_pool, settings.selection
    home = make_home(runner, settings, model, device)
    counters = Counters()
    placement = settings.placement
    connection = make_connection(
        run_dirs=[rank_run_dir(placement, n) for n in range(placement.head_shards)],
        settings=settings,
        model=model,
        sizes=pool.mapped_sizes,
        kept=pool.mapped,
        counters=counters,
    )
    if selection.declared.predicts_from_hidden:
        predictor = live_predictor(runner, settings, model, device=device)
        predictor.load()
        layers, cos_sin = predictor.weights()
        if placement.has_far_host:  # they travel, and the other host has a bound on them
            cos_sin = cos_sin[: num_positions(model, settings.cache.capacity_tokens)]
        if pool.mapped.homes.are_on_gpu:  # what a step reads all of lies where it is read
            for part in connection.parts:
                put_weights(part.own, layers, cos_sin, part.shard)
        else:
            put_weights(pool.mapped, layers, cos_sin)
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
        refresh=refresh_for(runner, selection),
    )
    link = _link(connection, runtime, pool)
    link.hook(runner.model)
    is_far = placement.has_far_pool
    cache_device = pool.mapped.homes.engine if is_far else device
    # Exact layers read host memory from here.
    is_far = is_far and not placement.host_engine
    backend = backend_of(runner, runtime, link, home, cache_device=cache_device, is_far=is_far)
    runtime.follow(link, backend)
    runtime_module.set_current(runtime)
    return backend


def wait_limit_s(settings: RankSettings) -> float:
    """Return how long the model's GPU waits for the engine, if nobody notices that it is lost."""
    limit = limit_s(settings.exchange)
    # A CPU takes its time. So does a host that launches each kernel of a step: a policy of its own
    # may have one compiled in the middle of it.
    if settings.placement.host_engine or not settings.selection.declared.is_captured:
        limit = max(limit, settings.exchange.transfer_timeout_s)
    return limit


def _place(settings: RankSettings) -> str:
    placement, own = settings.placement, "a process of its own"
    if placement.link == "message":
        return f"{own}, by messages"
    if placement.host_engine:
        return f"{own}, in shared memory, on the host's CPU"
    is_one = placement.head_shards == 1
    on_gpus = ", on a second GPU" if is_one else ", on GPUs of their own"
    return f"{own}, in shared memory" + (on_gpus if placement.has_far_pool else "")


def _link(
    connection: SharedConnection | ShardedConnection, runtime: SharedRuntime, pool: Any
) -> SharedLink:
    """Return the link to the engines' processes, which waits on a GPU or on the host."""
    settings, num_layers = runtime.settings, runtime.model.num_layers
    signals: HostSignals
    if pool.mapped.homes.are_on_gpu:
        signals = StreamSignals(
            connection.parts, num_layers, timeout_s=wait_limit_s(settings),
            sends_beside=settings.placement.has_far_pool,
        )  # fmt: skip
    else:
        signals = HostSignals(connection.parts, num_layers)
    return SharedLink(
        connection,
        signals,
        generation_of=runtime.generation,
        rows_on_host=lambda: runtime.rows_on_host,
        pool=pool,
    )
