# SPDX-License-Identifier: Apache-2.0
"""A scripted inference rank: it knows the truth, and checks everything that it is told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandemkv.cache_rank.counters import Counters
from tandemkv.cache_rank.policies.registry import selection_values
from tandemkv.cache_rank.protocol.control import ControlClient
from tandemkv.cache_rank.protocol.fake_transport import FakeTransport, fake_pair
from tandemkv.cache_rank.protocol.handshake import make_hello, open_epoch
from tandemkv.cache_rank.protocol.messages import (
    FreeSlots,
    Hello,
    ReleaseRow,
    RowFlag,
    RowStep,
    StatusReply,
    StatusRequest,
    StepBegin,
    StepKind,
    Timing,
    Welcome,
)
from tandemkv.cache_rank.protocol.model_spec import ModelSpec, read_model_spec
from tandemkv.cache_rank.protocol.pack_layout import read_header
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings import RankSettings
from tandemkv.cache_rank.protocol.step_program import (
    StepProgram,
    Transfer,
    TransferKind,
    exact_rows,
    seeded_rows,
    sparse_rows,
)
from tandemkv.cache_rank.resources import Resources
from tandemkv.cache_rank.service import CacheRankService

MAX_ROWS = 4


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def rank_settings(*, exchange: dict[str, Any] | None = None, **selection: Any) -> RankSettings:
    values = {
        "budget_tokens": 16,
        "num_sink_tokens": 2,
        "num_recent_tokens": 8,
        "resident_factor": 2.0,
        "exact_layers": (0,),
        "fetch_cap": 4,
        "seed_window": 6,
    }
    return RankSettings.model_validate(
        {
            "selection": selection_values(values | selection),
            "exchange": {
                "layers_per_pack": 3,
                "transfer_timeout_s": 10,
                "heartbeat_interval_s": 0.2,
                "heartbeat_misses": 60,
            }
            | (exchange or {}),
            "cache": {"capacity_tokens": 2048, "poison_freed_slots": True},
        }
    )


@dataclass
class Request:
    """The truth about a request. `k`, `v`: [L, n, H, D]; `slots`: where they are stored."""

    row: int
    generation: int
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    stored: int = 0

    @property
    def owner(self) -> tuple[int, int]:
        return self.row, self.generation


@dataclass
class ScriptedRank:
    """The inference rank's part of the protocol, in one thread, without a model.

    What is resident is mirrored: `positions` [L, rows, H, R] and the K rows that came.
    """

    model: ModelSpec
    settings: RankSettings
    control: ControlClient
    transport: FakeTransport
    welcome: Welcome
    rng: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))
    step_id: int = 0
    applied_seq: int = 0
    num_packs: int = 0
    next_slot: int = 1
    acknowledge: bool = True
    exact_outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    num_fetched: int = 0
    free_slots: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        timing, traits = Timing(self.welcome.timing), self.welcome.traits
        self.program = StepProgram(self.model, self.settings, timing, traits)
        shape = (
            self.model.num_layers,
            MAX_ROWS + 1,
            self.model.num_kv_heads,
            self.settings.selection.num_resident,
        )
        self.positions = torch.full(shape, -1, dtype=torch.int32)
        self.dtype = getattr(torch, self.model.dtype)
        self.resident_k = torch.zeros(*shape, self.model.head_dim, dtype=self.dtype)
        self.resident_v = torch.zeros_like(self.resident_k)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rng).to(self.dtype)

    def new_request(self, row: int, length: int, generation: int = 1) -> Request:
        shape = (self.model.num_layers, length, self.model.num_kv_heads, self.model.head_dim)
        reused = min(length, len(self.free_slots))
        ids = [self.free_slots.pop() for _ in range(reused)]
        ids += range(self.next_slot, self.next_slot + length - reused)
        self.next_slot += length - reused
        # Scattered slots, so that position and slot are never the same by chance.
        slots = torch.tensor(ids)[torch.randperm(length, generator=self.rng)]
        return Request(
            row, generation, self.random(*shape), self.random(*shape), slots.to(torch.int32)
        )

    def flags(self, length: int, *, exact: bool = False) -> int:
        selection = self.settings.selection
        fits = length <= selection.num_resident + selection.num_recent_tokens
        if fits and selection.dense_while_fits:
            return 0
        return int(RowFlag.EXACT if self.welcome.all_exact or exact else RowFlag.SPARSE)

    def settle(self) -> StatusReply:
        """Wait until everything sent has been handled."""
        reply = self.control.request(StatusRequest(), 10.0)
        assert isinstance(reply, StatusReply)
        return reply

    def free(self, slots: torch.Tensor) -> None:
        self.control.send(FreeSlots(epoch=self.welcome.epoch, num_slots=len(slots)))
        self.transport.issue_send(slots.to(torch.int32).contiguous())

    def release(self, request: Request) -> None:
        row, generation = request.owner
        self.control.send(ReleaseRow(epoch=self.welcome.epoch, row=row, generation=generation))

    def extend(self, *requests: Request, upto: int | None = None) -> None:
        """Prefill the requests, up to `upto` tokens (a chunk), else to their end."""
        steps = []
        for request in requests:
            self.resident_k[:, request.row] = self.resident_v[:, request.row] = 0
            length = len(request.slots) if upto is None else upto
            is_last = length == len(request.slots)
            flags = RowFlag.SEED | self.flags(length) if is_last else 0
            window = 0
            if flags & RowFlag.SPARSE:
                window = min(self.settings.selection.seed_window, length - request.stored)
            steps.append(RowStep(*request.owner, length, request.stored, int(flags), window))
        table = torch.cat([r.slots[: s.length] for r, s in zip(requests, steps, strict=True)])
        for transfer in self._begin(StepKind.EXTEND, steps, table):
            self._extend_transfer(transfer, list(requests), steps)
        for request, step in zip(requests, steps, strict=True):
            request.stored = step.length
            if step.flags & RowFlag.SEED and not step.flags & RowFlag.SPARSE:
                self._fill_identity(request)

    def _fill_identity(self, request: Request) -> None:
        count = self.positions.shape[-1]
        self.positions[:, request.row] = torch.arange(count, dtype=torch.int32)

    def _begin(
        self,
        kind: StepKind,
        steps: list[RowStep],
        table: torch.Tensor,
        dirty: tuple[Request, ...] = (),
    ) -> list[Transfer]:
        self.step_id += 1
        resent = [RowStep(*r.owner, len(r.slots), len(r.slots), 0, 0) for r in dirty]
        table = torch.cat([*(r.slots for r in dirty), table])
        step = StepBegin(
            epoch=self.welcome.epoch,
            step_id=self.step_id,
            kind=int(kind),
            rows=steps,
            dirty=resent,
            num_table_slots=len(table),
            applied_seq=self.applied_seq if self.acknowledge else 0,
        )
        self.control.send(step)
        transfers = self.program.transfers(step)
        assert transfers.pop(0).kind is TransferKind.SLOT_TABLE
        self.transport.issue_send(table.contiguous())
        return transfers

    def receive(self, transfer: Transfer) -> torch.Tensor:
        buffer = torch.empty(transfer.shape, dtype=getattr(torch, transfer.dtype))
        self.transport.issue_recv(buffer).wait(None)
        return buffer

    def send(self, transfer: Transfer, tensor: torch.Tensor) -> None:
        assert tuple(tensor.shape) == transfer.shape
        self.transport.issue_send(tensor.contiguous())

    def _extend_transfer(
        self, transfer: Transfer, requests: list[Request], steps: list[RowStep]
    ) -> None:
        layer = transfer.layers[0]
        pairs = list(zip(requests, steps, strict=True))
        match transfer.kind:
            case TransferKind.RESTORE:
                got = self.receive(transfer)
                for part, truth in zip(got, ("k", "v"), strict=True):
                    want = [getattr(r, truth)[layer, : s.prefix_len] for r, s in pairs]
                    assert torch.equal(part, torch.cat(want))
            case TransferKind.CHUNK_KV:
                kv = [
                    torch.cat([values[layer, s.prefix_len : s.length] for values, s in side])
                    for side in ([(r.k, s) for r, s in pairs], [(r.v, s) for r, s in pairs])
                ]
                self.send(transfer, torch.stack(kv))
            case TransferKind.SEED_QUERY:
                self.queries[layer] = self.random(*transfer.shape)
                self.send(transfer, self.queries[layer])
            case TransferKind.SEED:
                seeds = self.receive(transfer)
                by_row = {r.row: r for r in requests}
                for step, seed in zip(seeded_rows(steps), seeds, strict=True):
                    self._take_seed(layer, by_row[step.row], step.length, seed)
            case _:
                raise AssertionError(transfer.kind)

    def _take_seed(self, layer: int, request: Request, length: int, seed: torch.Tensor) -> None:
        self.positions[layer, request.row] = seed
        for head, row in enumerate(seed):
            there = row >= 0
            self.resident_k[layer, request.row, head, there] = request.k[
                layer, row[there].long(), head
            ]
        self.check_resident(layer, request, length + 1)

    def decode(
        self,
        *requests: Request,
        exact: bool = False,
        dirty: tuple[Request, ...] = (),
        padding: int = 0,
    ) -> None:
        """Decode one token of each request; `padding` rows 0 follow."""
        steps = []
        for request in requests:
            grown = self.new_request(request.row, 1)
            request.k = torch.cat([request.k, grown.k], dim=1)
            request.v = torch.cat([request.v, grown.v], dim=1)
            request.slots = torch.cat([request.slots, grown.slots])
            length = len(request.slots)
            flags = self.flags(length, exact=exact)
            steps.append(RowStep(*request.owner, length, length - 1, flags, 0))
        steps += [RowStep(0, 0, 0, 0, 0, 0)] * padding
        table = torch.cat(
            [r.slots[-1:] for r in requests] + [torch.zeros(padding, dtype=torch.int32)]
        )
        before = [(r.slots, r) for r in dirty]
        for slots, request in before:  # resent as of before the step
            request.slots = slots[:-1] if request in requests else slots
        transfers = self._begin(StepKind.DECODE, steps, table, dirty)
        for slots, request in before:
            request.slots = slots
        for transfer in transfers:
            self._decode_transfer(transfer, list(requests), steps)
        for request in requests:
            request.stored = len(request.slots)

    def _decode_transfer(
        self, transfer: Transfer, requests: list[Request], steps: list[RowStep]
    ) -> None:
        layer = transfer.layers[0]
        by_row = {r.row: r for r in requests}
        match transfer.kind:
            case TransferKind.HIDDEN:
                self.hidden[layer] = self.random(*transfer.shape)
                self.send(transfer, self.hidden[layer])
            case TransferKind.QUERY | TransferKind.EXACT_QUERY:
                self.queries[layer] = self.random(*transfer.shape)
                self.send(transfer, self.queries[layer])
            case TransferKind.PACK | TransferKind.DELTA:
                self._apply(transfer, [by_row[s.row] for s in sparse_rows(steps)])
            case TransferKind.EXACT_OUTPUT:
                self.exact_outputs[layer] = self.receive(transfer)
                is_exact = layer in self.settings.selection.exact_layer_ids
                rows = [by_row[s.row] for s in exact_rows(steps, is_exact)]
                self._check_exact(layer, rows)
            case TransferKind.STEP_KV:
                parts = []
                for each in transfer.layers:
                    k = torch.stack([r.k[each, -1] for r in requests])
                    v = torch.stack([r.v[each, -1] for r in requests])
                    width = transfer.shape[2] - 2 * self.model.num_kv_heads
                    q = self.random(len(steps), width, self.model.head_dim)
                    self.queries[each] = q
                    kv = torch.cat([k, v], dim=1)
                    pad = torch.full(
                        (len(steps) - len(requests), *kv.shape[1:]), float("nan"), dtype=self.dtype
                    )
                    parts.append(torch.cat([torch.cat([kv, pad]), q], dim=1))
                self.send(transfer, torch.stack(parts))
            case _:
                raise AssertionError(transfer.kind)

    def _apply(self, transfer: Transfer, requests: list[Request]) -> None:
        layout = self.program.pack_layout(len(transfer.layers), len(requests))
        views = layout.views(self.receive(transfer))
        self.num_packs += 1
        header = read_header(views)
        assert header == (self.welcome.epoch, self.step_id, self.num_packs)
        self.applied_seq = header.seq
        self.log_weight = views.log_weight.clone()
        assert views.rows.tolist() == [r.row for r in requests]
        assert views.generations.tolist() == [r.generation for r in requests]
        lag = int(transfer.kind is TransferKind.DELTA)
        for i, layer in enumerate(transfer.layers):
            for j, request in enumerate(requests):
                for head in range(self.model.num_kv_heads):
                    there = views.fetch_slot[i, j, head] >= 0
                    slot = views.fetch_slot[i, j, head][there].long()
                    self.num_fetched += len(slot)
                    self.positions[layer, request.row, head, slot] = views.fetch_pos[i, j, head][
                        there
                    ]
                    self.resident_k[layer, request.row, head, slot] = views.k[i, j, head][there]
                    self.resident_v[layer, request.row, head, slot] = views.v[i, j, head][there]
                self.check_resident(layer, request, len(request.slots) + lag)

    def check_resident(self, layer: int, request: Request, length: int) -> None:
        """Check the invariants as of the step with `length` tokens."""
        selection = self.settings.selection
        hi = max(0, length - selection.num_recent_tokens)
        want = min(selection.num_resident, hi)
        for head, row in enumerate(self.positions[layer, request.row]):
            filled = row >= 0
            assert int(filled.sum()) == want, f"layer {layer} head {head}: {row.tolist()}"
            assert bool(filled[:want].all()), "holes"
            positions = row[:want].long()
            assert len(positions.unique()) == want, "a token twice"
            assert want == 0 or int(positions.max()) < hi
            sink = min(selection.num_sink_tokens, hi)
            assert positions[:sink].tolist() == list(range(sink))
            known = self.resident_k[layer, request.row, head, :want]
            came = known.abs().sum(-1) > 0  # identity rows came from staging, not from us
            assert torch.equal(known[came], request.k[layer, positions[came], head])
            known = self.resident_v[layer, request.row, head, :want]
            came = known.abs().sum(-1) > 0
            assert torch.equal(known[came], request.v[layer, positions[came], head])

    def _check_exact(self, layer: int, requests: list[Request]) -> None:
        for request, query, got in zip(
            requests, self.queries[layer], self.exact_outputs[layer], strict=True
        ):
            hi = max(0, len(request.slots) - self.settings.selection.num_recent_tokens)
            k = request.k[layer, :hi].double().repeat_interleave(self.model.gqa_group_size, 1)
            v = request.v[layer, :hi].double().repeat_interleave(self.model.gqa_group_size, 1)
            logits = torch.einsum("hd,nhd->hn", query.double(), k) * self.model.scale
            out = torch.einsum("hn,nhd->hd", torch.softmax(logits, -1), v)
            torch.testing.assert_close(got[:, :-1].double(), out, atol=1e-5, rtol=1e-5)
            lse = torch.logsumexp(logits, -1)
            torch.testing.assert_close(got[:, -1].double(), lse, atol=1e-5, rtol=1e-5)


@dataclass
class Served:
    """A service in a thread, and how to meet it."""

    service: CacheRankService
    counters: Counters
    run_dir: RunDir
    settings: RankSettings
    model: ModelSpec
    pairs: queue.Queue[FakeTransport]
    thread: threading.Thread
    stop: threading.Event
    controls: list[ControlClient] = field(default_factory=list)

    def hello(self, **overrides: Any) -> Hello:
        values: dict[str, Any] = {
            "token": self.run_dir.token,
            "model": self.model,
            "settings": self.settings,
            "max_rows": MAX_ROWS,
            "page_size": 1,
        }
        return make_hello(**values | overrides)

    def connect(self, **overrides: Any) -> ScriptedRank:
        control = ControlClient(self.run_dir)
        self.controls.append(control)
        welcome = open_epoch(control, self.hello(**overrides), 10.0)
        transport = self.pairs.get(timeout=10)
        return ScriptedRank(self.model, self.settings, control, transport, welcome)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        for _ in range(400):
            if condition():
                return
            threading.Event().wait(0.02)
        raise AssertionError("the condition did not come true within 8 s")


@pytest.fixture
def serve(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(settings: RankSettings | None = None, model_dir: Path = tiny_model_dir) -> Served:
        settings = settings or rank_settings()
        counters = Counters()
        pairs: queue.Queue[FakeTransport] = queue.Queue()

        def connect(store_path: Path, *, rank: int, timeout_s: float) -> FakeTransport:
            assert rank == 1
            theirs, ours = fake_pair(timeout_s=timeout_s)
            pairs.put(theirs)
            return ours

        run_dir = RunDir.create(tmp_path / f"run{len(started)}")
        service = CacheRankService(
            run_dir=run_dir,
            resources=Resources(model_dir, settings, counters),
            settings=settings,
            max_rows=MAX_ROWS,
            counters=counters,
            connect=connect,
        )
        stop = threading.Event()
        thread = threading.Thread(target=service.run, args=(stop,), daemon=True)
        thread.start()
        model = read_model_spec(model_dir, dtype="float32", max_context=300)
        served = Served(service, counters, run_dir, settings, model, pairs, thread, stop)
        started.append(served)
        return served

    yield start
    for served in started:
        for control in served.controls:
            control.close()
        served.stop.set()
        served.thread.join(10)
        assert not served.thread.is_alive()


@pytest.fixture
def settings_of() -> Callable[..., RankSettings]:
    return rank_settings
