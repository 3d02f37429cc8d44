# SPDX-License-Identifier: Apache-2.0
"""Both ranks' real code over an in-memory transport, and float64 dense attention beside it.

A scripted model stands in for SGLang: q, k, v are random functions of (layer, position).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from tandemkv.cache_rank.calibration.resolve import resolve_calibration
from tandemkv.cache_rank.counters import BusyClock
from tandemkv.cache_rank.counters import Counters as CacheCounters
from tandemkv.cache_rank.policies.base import (
    HeadClusters,
    PolicyContext,
    Rotary,
)
from tandemkv.cache_rank.policies.registry import find_policy, make_policy, resolve_selection
from tandemkv.cache_rank.protocol.exchange_settings import CacheSettings, ExchangeSettings
from tandemkv.cache_rank.protocol.fake_transport import fake_pair
from tandemkv.cache_rank.protocol.host_staged import HostStagedTransport
from tandemkv.cache_rank.protocol.messages import FreeSlots, StepBegin
from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings import (
    RankSettings,
)
from tandemkv.cache_rank.protocol.step_program import StepProgram, TransferKind
from tandemkv.cache_rank.protocol.transport import Transport
from tandemkv.cache_rank.session import Session
from tandemkv.cache_rank.store import KVStore
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.decode_step import DecodeStep
from tandemkv.inference_rank.extend_step import ExtendBatch, ExtendStep
from tandemkv.inference_rank.packs import PackQueue
from tandemkv.inference_rank.refresh import RefreshSchedule
from tandemkv.inference_rank.resident_set import ResidentSet
from tandemkv.inference_rank.runtime import Runtime
from tandemkv.inference_rank.step_transfers import StepTransfers

LAYERS, HEADS, GROUP, DIM, HIDDEN, CONTEXT = 4, 2, 2, 8, 16, 200
MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=LAYERS,
    num_qo_heads=HEADS * GROUP,
    num_kv_heads=HEADS,
    head_dim=DIM,
    hidden_size=HIDDEN,
    max_context=CONTEXT,
    dtype="float32",
    model_hash="tiny",
)


CLUSTERS = HeadClusters(((0, 0), (0, 1), (0, 0), (0, 1)), ((1,), (0, 1), (1,), (0, 1)))
"""Layers 0 and 2 follow head 1; in layers 1 and 3 each head looks for itself."""
CPU = torch.device("cpu")
TRIGGER, PERIOD = 7, 6


def make_settings(*, exchange: dict[str, Any] | None = None, **selection: Any) -> RankSettings:
    values = {
        "budget_tokens": 64,
        "resident_factor": 2.0,
        "num_sink_tokens": 2,
        "num_recent_tokens": 8,
        "exact_layers": (1,),
        "seed_window": 4,
    }
    return RankSettings(
        selection=resolve_selection(values | selection),
        exchange=ExchangeSettings(
            **({"layers_per_pack": 3, "transfer_timeout_s": 20} | (exchange or {}))
        ),
        cache=CacheSettings(capacity_tokens=2000, poison_freed_slots=True),
    )


@dataclass
class Predictor:
    """Stands in for W_q: any function of the residual stream will do."""

    def predict_query(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        del positions
        generator = torch.Generator().manual_seed(layer)
        weight = torch.randn(HIDDEN, HEADS * GROUP * DIM, generator=generator)
        weight = weight.to(hidden.device, hidden.dtype)
        return (hidden @ weight).view(len(hidden), HEADS * GROUP, DIM)


@dataclass
class Client:
    """The part of `CacheClient` that steps use, over an in-memory pair."""

    program: StepProgram
    transport: Any
    inbox: queue.Queue[Any]
    all_exact: bool
    epoch: int = 1
    lost_reason: str | None = None

    def begin_step(self, step: StepBegin, table: torch.Tensor) -> StepTransfers:
        self.inbox.put(step)
        transfers = StepTransfers(self.transport, self.program.transfers(step), table.device)
        transfers.send(TransferKind.SLOT_TABLE, (), table)
        return transfers

    def free(self, slots: torch.Tensor) -> None:
        ids = slots.to(torch.int32)
        self.inbox.put(FreeSlots(epoch=1, num_slots=len(ids)))
        self.transport.issue_send(ids)


@dataclass
class World:
    """Two ranks and a scripted model.

    Both are on `device`, unless there is a `cache_device`: then what the inference rank exchanges
    is staged in host memory.
    """

    settings: RankSettings
    delay_s: float | None = None
    device: torch.device = CPU
    cache_device: torch.device | None = None
    dtype: torch.dtype = torch.float32
    runtime: Runtime = field(init=False)
    step: DecodeStep = field(init=False)
    errors: list[BaseException] = field(default_factory=list)
    watch: Callable[[int, list[int], list[int], torch.Tensor], None] | None = None
    """Gets layer, rows, lengths and output ``[B, Hq, D]`` of every attention of a decode step."""

    def __post_init__(self) -> None:
        ours: Transport
        ours, theirs = fake_pair(delay=self.delay_s)
        if self.cache_device is not None:
            ours = HostStagedTransport(ours, self.device)
        cache_device = self.cache_device or self.device
        name = str(self.dtype).removeprefix("torch.")
        model = msgspec.structs.replace(MODEL, dtype=name)
        cache_counters = self.cache_counters = CacheCounters()
        store = KVStore(
            model,
            num_slots=self.settings.cache.capacity_tokens + 1,
            index_dtype=self.settings.selection.index_dtype,
            poison=True,
            counters=cache_counters,
            device=cache_device,
        )
        rotary = Rotary((1.0 / 10000 ** (torch.arange(0, DIM, 2) / DIM)).to(cache_device))
        capabilities = find_policy(self.settings.selection.policy).capabilities
        share = None
        if capabilities.calibration != "sync_kv":
            share = resolve_calibration(self.settings.selection, model, capabilities).share
        policy = make_policy(
            self.settings.selection.policy,
            PolicyContext(
                model=model,
                selection=self.settings.selection,
                rotary=rotary,
                share=share,
                clusters=CLUSTERS,
            ),
        )
        self.session = Session(
            epoch=1,
            model=model,
            settings=self.settings,
            max_rows=4,
            transport=theirs,
            store=store,
            policy=policy,
            predictor=Predictor(),
            counters=cache_counters,
            clock=BusyClock(),
        )
        inbox: queue.Queue[Any] = queue.Queue()
        pool = SimpleNamespace(
            req_to_token=torch.zeros(5, CONTEXT, dtype=torch.int32, device=self.device),
            req_generation=torch.ones(5, dtype=torch.int64),
        )
        counters = Counters()
        resident = ResidentSet(model, self.settings.selection, 4, self.device)
        client = Client(
            program=StepProgram(model, self.settings, capabilities.timing, policy.traits),
            transport=ours,
            inbox=inbox,
            all_exact=policy.capabilities.all_exact,
        )
        self.runtime = Runtime(
            settings=self.settings,
            model=model,
            client=client,  # type: ignore[arg-type]
            resident=resident,
            counters=counters,
            req_to_token_pool=pool,
            refresh=RefreshSchedule(
                self.settings.selection.declared.refresh, PERIOD, frozenset((TRIGGER,))
            ),
        )
        self.runtime.packs = PackQueue(
            resident=resident,
            exchange=self.settings.exchange,
            counters=counters,
            generation_of=self.runtime.generation,
            epoch=1,
        )
        self.next_slot = 1
        self._thread = threading.Thread(target=self._serve, args=(inbox,), daemon=True)
        self._thread.start()

    def _serve(self, inbox: queue.Queue[Any]) -> None:
        while (message := inbox.get()) is not None:
            try:
                self.session.handle(message)
            except BaseException as error:
                self.errors.append(error)
                self.session.abort()
                return

    def tensors(self, layer: int, seed: int, start: int, end: int) -> list[torch.Tensor]:
        """q, k, v and hidden of positions [start, end) of request `seed`."""
        parts = []
        for position in range(start, end):
            generator = torch.Generator().manual_seed((seed * 1000 + position) * 100 + layer)
            parts.append(torch.randn(HEADS * (GROUP + 2) * DIM + HIDDEN, generator=generator))
        flat = torch.stack(parts).to(self.device, self.dtype)
        q = flat[:, : HEADS * GROUP * DIM].view(-1, HEADS * GROUP, DIM)
        k = flat[:, HEADS * GROUP * DIM :][:, : HEADS * DIM].reshape(-1, HEADS, DIM)
        v = flat[:, HEADS * (GROUP + 1) * DIM :][:, : HEADS * DIM].reshape(-1, HEADS, DIM)
        return [q.contiguous(), k, v, flat[:, -HIDDEN:].contiguous()]

    def dense(self, layer: int, seed: int, start: int, end: int) -> torch.Tensor:
        """Float64 attention of positions [start, end) over everything before them."""
        q, k, v, _ = (t.double() for t in self.tensors(layer, seed, 0, end))
        q = q[start:]
        k, v = k.repeat_interleave(GROUP, 1), v.repeat_interleave(GROUP, 1)
        logits = torch.einsum("qhd,khd->hqk", q, k) * MODEL.scale
        mask = torch.arange(end)[None] <= torch.arange(start, end)[:, None]
        weights = logits.masked_fill(~mask.to(self.device), float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    def extend(
        self, rows: list[int], prefixes: list[int], lengths: list[int], *, last: bool
    ) -> float:
        for row, prefix, length in zip(rows, prefixes, lengths, strict=True):
            n = length - prefix
            slots = torch.arange(self.next_slot, self.next_slot + n, dtype=torch.int32)
            self.runtime.req_to_token_pool.req_to_token[row, prefix:length] = slots
            self.next_slot += n
        self.runtime.middle_chunk_row = None if last else rows[-1]
        step = ExtendStep(self.runtime, ExtendBatch(rows, prefixes, lengths))
        worst = 0.0
        for layer in range(LAYERS):
            spans = list(zip(rows, prefixes, lengths, strict=True))
            q, k, v, _ = (
                torch.cat(x) for x in zip(*(self.tensors(layer, *s) for s in spans), strict=True)
            )
            out = step.attend(layer, q, k, v)
            want = torch.cat([self.dense(layer, *s) for s in spans])
            worst = max(worst, float((out.double() - want).abs().max()))
        step.finish()
        return worst

    def decode(self, rows: list[int], lengths: list[int]) -> float:
        """One decode step; returns the worst error against dense attention.

        Every eleventh token is one that ends a sentence.
        """
        for row, length in zip(rows, lengths, strict=True):
            self.runtime.req_to_token_pool.req_to_token[row, length - 1] = self.next_slot
            self.next_slot += 1
        assert self.runtime.packs is not None
        tokens = [TRIGGER if length % 11 == 0 else 0 for length in lengths]
        step = self.step = DecodeStep(self.runtime, self.runtime.packs, rows, lengths, tokens)
        worst = 0.0
        for layer in range(LAYERS):
            spans = [(row, length - 1, length) for row, length in zip(rows, lengths, strict=True)]
            parts = [self.tensors(layer, *s) for s in spans]
            q, k, v, hidden = (torch.cat(x) for x in zip(*parts, strict=True))
            if step.wants_layer_input:
                step.on_layer_input(layer, hidden)
            out = step.attend(layer, q, k, v)
            if self.watch is not None:
                self.watch(layer, rows, lengths, out)
            want = torch.cat([self.dense(layer, *s) for s in spans])
            worst = max(worst, float((out.double() - want).abs().max()))
        step.finish()
        return worst


def check_residents(world: World, *, layer: int, row: int, length: int) -> None:
    """Every head holds R distinct tokens outside the ring, and their true keys."""
    resident = world.runtime.resident
    held = resident.positions[layer, row, :, : resident.num_resident].long()
    keys = world.tensors(layer, row, 0, length)[1]
    for head, positions in enumerate(held):
        assert len(set(positions.tolist())) == resident.num_resident
        assert int(positions.max()) <= length - resident.ring
        slots = resident.k[layer, row, : resident.num_resident, head]
        torch.testing.assert_close(slots, keys[positions, head], rtol=0, atol=0)
