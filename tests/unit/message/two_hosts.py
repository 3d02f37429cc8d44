# SPDX-License-Identifier: Apache-2.0
"""Two hosts of link `message` in one process: their memory, and a direction between them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from tape import Tape

from tandemkv.cache_rank.policies.registry import selection_values
from tandemkv.cache_rank.protocol.engine_program import DecodeKind, EngineProgram
from tandemkv.cache_rank.protocol.gpu_flags import GpuFlags, word_of
from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import RegionSizes, specs_by_life
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec, part_of
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry, StepRow
from tandemkv.cache_rank.pump.contents import Contents
from tandemkv.cache_rank.pump.lanes import HostReceiveLane, HostSendLane, host_flag
from tandemkv.cache_rank.pump.plan import Flag, FlagKind, Message
from tandemkv.cache_rank.pump.records import Outbox, read_records
from tandemkv.cache_rank.pump.side import Side
from tandemkv.cache_rank.pump.stream_lanes import StreamReceiveLane, StreamSendLane

MODEL = ModelSpec(
    architecture="Any", num_layers=6, num_qo_heads=4, num_kv_heads=2, head_dim=8, hidden_size=16,
    max_context=64, dtype="float32", model_hash="",
)  # fmt: skip
NUM_ROWS, COLD = 5, 20
ROWS = (
    StepRow(row=3, generation=1, length=40, prefix_len=39),
    StepRow(row=1, generation=1, length=12, prefix_len=11),
)
"""One that is selected for, and one that attends to all of its tokens."""
SELECTING = list(DecodeKind).index(DecodeKind.SELECTING)
DECODE = StepEntry(kind=EntryKind.DECODE, step=7, variant=SELECTING, num_cold=COLD, rows=ROWS)
EXTEND = StepEntry(
    kind=EntryKind.EXTEND, step=7,
    rows=(StepRow(row=3, generation=1, length=40, prefix_len=8, window=4),),
)  # fmt: skip
POLICIES = pytest.mark.parametrize("policy", ["oracle", "look_ahead", "last_query"])
"""With a selection in the step by its query, by a predicted one, and for the next step."""
WAYS = pytest.mark.parametrize("way", ["records", "queued", "captured"], indirect=True)


def settings_of(selection: Mapping[str, object]) -> RankSettings:
    """Return settings of link `message` with a selection."""
    return RankSettings.model_validate(
        {
            "selection": json.loads(json.dumps(selection_values(dict(selection)), default=vars)),
            "placement": {"link": "message", "two_gpus": True},
            "cache": {"capacity_tokens": 256},
        }
    )


class Queue:
    """A wire within this process; what is captured at both ends uses the same tensors."""

    def __init__(self) -> None:
        self.bodies: deque[torch.Tensor] = deque()
        self.captured: deque[torch.Tensor] = deque()

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()

    def send(self, body: torch.Tensor) -> None:
        (self.bodies if Tape.active is None else self.captured).append(body.clone())

    def receive(self, out: torch.Tensor) -> None:
        body = (self.bodies if Tape.active is None else self.captured).popleft()
        assert len(body) == len(out)
        out.copy_(body)


class End:
    """The memory of one host; `has_all`: filled at random, not with zeros.

    `near`: of the inference rank's host, beside GPUs, where the pump of `shard` maps the heads of
    all in `kept`. Else all heads are those of the one cache rank, or of its host.
    """

    def __init__(
        self,
        policy: str,
        *,
        has_all: bool,
        model: ModelSpec = MODEL,
        near: HeadShard | None = None,
        kept: MappedTensors | None = None,
        late_layers: int = 0,
    ) -> None:
        given = {
            "policy": policy, "budget_tokens": 16, "resident_factor": 1.0, "num_sink_tokens": 2,
            "num_recent_tokens": 4, "fetch_cap": 3, "sample_tokens": 8, "exact_layers": [2],
            "late_layers": late_layers,
        }  # fmt: skip
        settings = settings_of(given)
        shard = near or HeadShard()
        sizes = RegionSizes(
            num_slots=257, num_rows=NUM_ROWS, page_size=1, is_apart=True, shard=shard,
            num_sharing=shard.count, has_whole_pool=True,
        )  # fmt: skip
        self.kept, self.tensors = kept or MappedTensors(), MappedTensors()
        model = part_of(model, shard)
        specs = specs_by_life(model, settings.selection, sizes, on_gpu=True)
        self.kept.allocate_all(specs.kept)
        self.tensors.allocate_all((*specs.own, *specs.epoch))
        self._specs = [spec for some in specs for spec in some]
        self.tensors.borrow(self.kept)
        self.program = EngineProgram(model, settings, page_size=1)
        self.side = Side(self.tensors, self.program, settings.selection, lambda: False, shard)
        self.flags = GpuFlags(self.tensors, model.num_layers, shard.index)
        _, _, width, num_heads, _ = self.side.resident[0].shape
        self.positions = torch.zeros(len(self.program.selecting), NUM_ROWS, num_heads, width).int()
        if has_all:
            torch.manual_seed(1)
            for spec in (*specs.kept, *specs.own):
                if spec.dtype == "float32":
                    self.tensors[spec.name].normal_()
            for row in range(1, NUM_ROWS):
                self.side.table[row] = torch.randperm(256)[:64] + 1

    def memory(self) -> list[torch.Tensor]:
        """Return all that a step may write."""
        return [self.positions, *(self.tensors[spec.name] for spec in self._specs)]

    def words(self, flag: Flag) -> torch.Tensor:
        """Return the words of a flag in GPU memory."""
        named = {
            FlagKind.BEGIN: self.flags.begin,
            FlagKind.END: self.flags.end,
            FlagKind.FINISHED: self.flags.finished,
        }
        if flag.kind in named:
            return named[flag.kind]
        of_layer: Any = getattr(self.flags, flag.kind.name.lower())
        return of_layer(flag.layer, flag.size)  # type: ignore[no-any-return]

    def raise_flag(self, flag: Flag, step: int) -> None:
        self.words(flag).fill_(word_of(step))
        self.side.flags.raise_to(host_flag(self.side, flag), step)


class Way:
    """Two hosts, and one direction between them; to the cache rank's, or back.

    `ends` are where messages come from and where they go, by default with all heads.
    """

    def __init__(
        self, way: str, policy: str, *, is_back: bool = False, ends: tuple[End, End] | None = None
    ) -> None:
        self.source, self.target = ends or (
            End(policy, has_all=True), End(policy, has_all=False)
        )  # fmt: skip
        self.is_queued, self.is_back, self.wire = way != "records", is_back, Queue()
        self.is_captured = way == "captured"
        positions = self.source.positions if is_back else None
        ours, theirs = self.source.side, self.target.side
        if self.is_queued:  # on a GPU kernels have written what a step is about
            for end in (self.source, self.target):
                end.side.requests = end.tensors["step_rows"], end.tensors["step_lengths"]
        self.sent, self.written = Contents(ours, positions), Contents(theirs)
        if is_back:  # whose requests both have
            theirs.table.copy_(ours.table)
        self.send: Any
        self.receive: Any
        if self.is_queued:
            options: dict[str, Any] = {"timeout_s": 1.0, "number": 0, "is_back": is_back}
            self.send = StreamSendLane(ours, self.sent, self.wire, **options)
            self.receive = StreamReceiveLane(theirs, self.written, self.wire, **options)
            if self.is_captured:
                self._prepare()
        else:
            self.send = HostSendLane(ours, self.sent, Outbox(self.wire))  # type: ignore[arg-type]
            self.receive = HostReceiveLane(theirs, self.written)

    def _prepare(self) -> None:
        """Have a decode step captured, which changes nothing."""
        kept = [x for end in (self.source, self.target) for x in end.memory()]
        kept += [x for x in (self.sent._sent,) if x is not None]
        before = [x.clone() for x in kept]
        rows = (StepRow(row=0, generation=0, length=1),) * len(ROWS)
        entry = replace(DECODE, kind=EntryKind.PREPARE, step=1, num_cold=0, rows=rows)
        self.recurring = self.sent.plan.recurring(entry, is_back=self.is_back)
        assert len(self.recurring) > 1
        assert not self.send.begin(entry, ())
        self.receive.begin(entry, ())
        assert not self.wire.captured
        for tensor, values in zip(kept, before, strict=True):
            tensor.copy_(values)

    def messages(self, entry: StepEntry) -> tuple[Message, ...]:
        plan = self.sent.plan
        return plan.back(entry) if self.is_back else plan.outward(entry)

    def carry(self, entry: StepEntry, *, without: Flag | None = None) -> None:
        """Send a step whose flags are raised but for one, and take what comes."""
        messages = self.messages(entry)
        for flag in (flag for message in messages for flag in message.waits):
            if flag != without:
                self.source.raise_flag(flag, entry.step)
        if without is not None:  # as who gives a step up
            self.source.side.flags.raise_to(self.source.side.at.ABORTED, entry.step)
        if self.is_queued and entry.kind is EntryKind.DECODE:
            for end in (self.source, self.target) if self.is_back else (self.source,):
                for name in ("row", "length"):
                    values = torch.tensor([getattr(row, name) for row in entry.rows])
                    end.tensors[f"step_{name}s"][: len(values)] = values
        for message in self.send.begin(entry, messages):
            self.send.send(message)
        if self.is_captured and entry.kind is EntryKind.DECODE:
            assert len(self.wire.bodies) == len(messages) - len(self.recurring)
        self.receive.begin(entry, messages)
        while self.wire.bodies and not self.is_queued:
            for record in read_records(self.wire.bodies.popleft()):
                self.receive.take(record)
        assert not self.wire.bodies
        assert self.receive.is_done

    def is_raised(self, flag: Flag, step: int) -> bool:
        if self.is_queued:
            return bool((self.target.words(flag) == step).all())
        if flag.kind is FlagKind.BEGIN:  # an announcement, there
            return True
        return self.target.side.flags.value(host_flag(self.target.side, flag)) == step


def step_slots(end: End) -> list[int]:
    return [int(end.side.table[row.row, row.length - 1]) for row in ROWS]
