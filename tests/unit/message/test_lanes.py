# SPDX-License-Identifier: Apache-2.0
"""What travels in a step, by records on a CPU, and as it is queued between GPUs.

The latter is played on a CPU, which does one thing after the other: a flag that is waited for has
to be raised already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
from tape import Tape, record_kernels
from two_hosts import (
    DECODE,
    EXTEND,
    MODEL,
    NUM_ROWS,
    POLICIES,
    ROWS,
    SELECTING,
    WAYS,
    End,
    Queue,
    Way,
    step_slots,
)

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, ProtocolError
from tandemkv.cache_rank.protocol.memory.shared_region import seed_buffer
from tandemkv.cache_rank.protocol.messages import RefreshRule
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry, StepRow
from tandemkv.cache_rank.pump import contents
from tandemkv.cache_rank.pump.contents import HEAD_BYTES, Contents
from tandemkv.cache_rank.pump.far import Announced, FarReceiver
from tandemkv.cache_rank.pump.gpu_link import PumpLanes
from tandemkv.cache_rank.pump.lanes import HostReceiveLane, HostSendLane
from tandemkv.cache_rank.pump.near import NearReceiver, Progress
from tandemkv.cache_rank.pump.plan import Flag, FlagKind, Message, PartKind
from tandemkv.cache_rank.pump.records import PIECE_BYTES, Op, Record


@POLICIES
@WAYS
def test_a_decode_step_goes_out(way: str, policy: str) -> None:
    link = Way(way, policy)
    link.carry(DECODE)
    source, target, slots = link.source, link.target, step_slots(link.source)
    assert step_slots(target) == slots
    assert torch.equal(target.side.kv[:, :, slots], source.side.kv[:, :, slots])
    assert target.side.kv.count_nonzero() == source.side.kv[:, :, slots].count_nonzero()
    for name, kind in (("streams", FlagKind.INPUT), ("queries", FlagKind.QUERY)):
        layers = [
            flag.layer
            for message in link.messages(DECODE)
            for flag in message.waits
            if flag.kind is kind
        ]
        assert torch.equal(target.tensors[name][layers, :2], source.tensors[name][layers, :2])
    for message in link.messages(DECODE):
        assert all(link.is_raised(flag, 7) for flag in message.raises)


@WAYS
def test_a_prompt_goes_out_and_its_sets_come_back(way: str) -> None:
    link = Way(way, "oracle")
    link.carry(EXTEND)
    source, target, (row,) = link.source.side, link.target.side, EXTEND.rows
    assert torch.equal(target.table[3, :40], source.table[3, :40])
    slots = source.table[3, row.prefix_len : row.length].long()
    assert torch.equal(target.kv[:, :, slots], source.kv[:, :, slots])
    windows = [x.tensors["seed_queries"][:, :4] for x in (target, source)]
    assert torch.equal(*windows)
    back = Way(way, "oracle", is_back=True)
    back.carry(EXTEND)
    for layer in range(MODEL.num_layers):
        is_sparse = back.source.program.is_sparse_layer(layer)
        for ours, theirs in zip(back.source.side.resident, back.target.side.resident, strict=True):
            assert torch.equal(ours[layer, 3], theirs[layer, 3]) is is_sparse
    assert back.is_raised(Flag(FlagKind.FINISHED), 7)


@POLICIES
@WAYS
def test_rows_that_change_come_back_of_selected_requests_alone(way: str, policy: str) -> None:
    link = Way(way, policy, is_back=True)
    source, target = link.source, link.target
    for layer in source.program.selecting:
        book = source.program.book_of(layer)
        for row, head, slot in ((3, 0, 5), (3, 1, layer), (1, 0, 2)):
            source.positions[book, row, head, slot] += 1
    link.carry(DECODE)
    for ours, theirs in zip(source.side.resident, target.side.resident, strict=True):
        changed = torch.zeros_like(theirs, dtype=torch.bool)
        for layer in source.program.selecting:
            changed[layer, 3, 5, 0] = changed[layer, 3, layer, 1] = True
        assert torch.equal(theirs, torch.where(changed, ours, 0.0))
    weights = target.side.log_weight
    layers = source.program.selecting
    assert torch.equal(weights[layers, 3], source.side.log_weight[layers, 3])
    assert not weights[:, 1].any()
    remote = [x.tensors["remote_outputs"][:2] for x in (source, target)]
    assert torch.equal(*remote)
    assert link.is_raised(Flag(FlagKind.FINISHED), 7)
    target.side.resident[0].zero_()
    link.carry(DECODE)
    assert not target.side.resident[0].any(), "what was sent is not sent again"


@POLICIES
@WAYS
def test_steps_follow_one_another(way: str, policy: str) -> None:
    link = Way(way, policy)
    source, target = link.source.side, link.target.side
    for step, entry in enumerate((DECODE, EXTEND, DECODE, DECODE), 7):
        source.kv.normal_()
        link.source.tensors["queries"].normal_()
        link.carry(replace(entry, step=step))
        slots = step_slots(link.source)
        assert torch.equal(target.kv[:, :, slots[:1]], source.kv[:, :, slots[:1]])
        assert link.is_raised(Flag(FlagKind.END), step)
    assert torch.equal(target.kv[:, :, slots], source.kv[:, :, slots])


@WAYS
def test_nothing_is_raised_for_what_was_given_up(way: str) -> None:
    link, missing = Way(way, "oracle"), Flag(FlagKind.QUERY, 3, 2)
    link.carry(DECODE, without=missing)
    flags = [flag for message in link.messages(DECODE) for flag in message.raises]
    at = flags.index(missing)
    assert all(link.is_raised(flag, 7) for flag in flags[:at])
    assert not any(link.is_raised(flag, 7) for flag in flags[at:])


@pytest.mark.parametrize("first", [7, 2**31 - 1, 2**32 - 1])
def test_a_wait_that_was_in_vain_is_named_and_ends_the_epoch(
    caplog: pytest.LogCaptureFixture, first: int
) -> None:
    """Else nobody learns why nothing comes any more; a flag holds 32 bits of a step's number."""
    link = Way("queued", "oracle")
    lanes, looks = PumpLanes(link.send, link.receive), iter([False, False, True])
    (watch,) = lanes.watches(lambda _: next(looks))
    link.carry(replace(DECODE, step=first))
    with caplog.at_level("INFO"):
        watch()
    assert not caplog.messages
    for step in (first + 1, first + 2):  # the next one may have begun
        link.carry(replace(DECODE, step=step), without=Flag(FlagKind.QUERY, 3, 2))
    (watch,) = lanes.watches(lambda _: False)
    with pytest.raises(
        CacheRankLostError,
        match=rf"^step {first + 1}: QUERY of layer 3 was not raised .* 1 s",
    ):
        watch()
    # Where its messages came the epoch goes on, until the other host ends it.
    looks = iter([False, False, True])
    link.send.lost_reason = lambda: ""
    (watch,) = lanes.watches(lambda _: next(looks))
    watch()
    assert [text.partition(":")[0] for text in caplog.messages] == [f"step {first + 1}"] * 2


def test_what_a_step_lacks_when_its_epoch_ends_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link = Way("queued", "oracle")
    lanes = PumpLanes(link.send, link.receive)
    (watch,) = lanes.watches(lambda _: True)
    with caplog.at_level("INFO"):
        watch()
        assert not caplog.messages
        link.carry(DECODE, without=Flag(FlagKind.QUERY, 3, 2))
        lanes.abort("the inference rank is gone")
        watch()
    said = "in the midst of step 7: QUERY of layer 3 is not raised"
    assert [text.partition(",")[0] for text in caplog.messages] == [said, said]


def test_a_lane_that_is_aborted_waits_for_nothing_in_vain() -> None:
    link = Way("queued", "oracle")
    link.send.abort()
    link.carry(DECODE)
    assert not link.send.lost_reason()
    assert Way("records", "oracle").send.is_lost is False
    assert not PumpLanes(HostSendLane(*[None] * 3), HostReceiveLane(*[None] * 2)).watches(bool)  # type: ignore[arg-type]


def test_a_step_that_was_given_up_has_an_end() -> None:
    link = Way("records", "oracle", is_back=True)
    link.carry(DECODE, without=Flag(FlagKind.READY, 0))
    assert link.is_raised(Flag(FlagKind.FINISHED), 7)
    assert not link.is_raised(Flag(FlagKind.READY, 1), 7)
    assert not link.target.side.resident[0].any()


def test_a_lane_that_is_aborted_raises_nothing() -> None:
    link = Way("queued", "oracle")
    link.send.abort()
    link.carry(DECODE)
    assert not link.is_raised(Flag(FlagKind.BEGIN), 7)
    assert not link.is_raised(Flag(FlagKind.END), 7)


@POLICIES
@pytest.mark.parametrize("entry", [DECODE, EXTEND], ids=["decode", "extend"])
def test_a_plan_has_the_k_and_v_of_each_layer_once(policy: str, entry: StepEntry) -> None:
    plan = Contents(End(policy, has_all=False).side).plan
    found = Counter(
        (part.layer, number)
        for message in plan.outward(entry)
        for part in message.parts
        if part.kind is PartKind.KV
        for number in range(part.first, part.first + part.num)
    )
    num_tokens = sum(row.length - row.prefix_len for row in entry.rows)
    assert set(found) == {(x, n) for x in range(MODEL.num_layers) for n in range(num_tokens)}
    assert set(found.values()) == {1}


def test_what_is_selected_for_the_next_step_goes_back_as_it_is_selected() -> None:
    """The next step waits for the last message, and it would be half a gigabyte."""
    for policy, late in (("last_query", ()), ("look_ahead", (0,))):
        end = End(policy, has_all=False, late_layers=len(late))
        messages = Contents(end.side).plan.back(DECODE)
        changed = {
            part.layer: message.raises
            for message in messages
            for part in message.parts
            if part.kind is PartKind.CHANGES
        }
        assert list(changed) == [x for x in end.program.selecting if x not in late] + [*late]
        assert changed == {x: (Flag(FlagKind.READY, x),) for x in end.program.selecting}
        assert (messages[-1].raises, messages[-1].parts) == ((Flag(FlagKind.FINISHED),), ())
        # What this step itself waits for is not behind it.
        kinds = [part.kind for message in messages for part in message.parts[:1]]
        assert PartKind.OUTPUT in kinds
        if policy == "last_query":
            assert kinds.index(PartKind.OUTPUT) == 0


def test_a_flag_tells_of_an_output_or_of_a_selection() -> None:
    """A request whose step is slow attends there, in each layer."""
    end = End("last_query", has_all=False)
    end.program.slow_steps = RefreshRule.PERIOD
    messages = Contents(end.side).plan.back(DECODE)
    flags = [flag for message in messages for flag in message.raises]
    assert [flag.layer for flag in flags[:-1]] == list(range(MODEL.num_layers))
    kinds = {part.kind for message in messages[:-1] for part in message.parts}
    assert kinds == {PartKind.OUTPUT}
    changed = [part.layer for part in messages[-1].parts if part.kind is PartKind.CHANGES]
    assert changed == end.program.selecting


def test_the_last_queries_of_a_step_are_not_held_up_by_one_another() -> None:
    model = msgspec.structs.replace(MODEL, num_layers=36)
    end = End("last_query", has_all=False, model=model)
    sizes = [
        sum(flag.kind is FlagKind.QUERY for flag in message.waits)
        for message in Contents(end.side).plan.outward(DECODE)
    ]
    assert sum(sizes) == 36
    assert max(sizes) == 4
    assert sizes[-4:] == [1, 1, 1, 0]


@POLICIES
@pytest.mark.parametrize("is_back", [False, True])
def test_a_message_takes_a_kernel_for_each_flag_and_each_part(
    policy: str, is_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are one behind the other, and the forward pass waits for them in each layer."""
    link, found = Way("queued", policy, is_back=is_back), list[int]()
    link.carry(DECODE)
    for lane in (link.send, link.receive):
        monkeypatch.setattr(lane, "_move", _counting(lane._move, found))
    record_kernels(monkeypatch)
    monkeypatch.setattr(link.target.side, "check_requests", lambda *_: None)  # as on a GPU
    link.carry(replace(DECODE, step=8))
    messages = link.messages(DECODE)
    few = [max(1, len(each.waits)) + len(each.parts) + 1 for each in messages]  # and its own
    # What a step is about is looked up once.
    extra = [count - least for count, least in zip(found, (*few, *few), strict=True)]
    assert [count for count in extra if count] == ([1, 2] if is_back else [4, 5]), extra


def _counting(move: Callable[[Message], None], found: list[int]) -> Callable[[Message], None]:
    """Count kernels; a wire's is one."""

    def counted(message: Message) -> None:
        tape = Tape(runs_kernels=True).record(lambda: move(message))
        found.append(tape.num_kernels)

    return counted


def test_a_piece_between_gpus_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    end = End("oracle", has_all=False)
    monkeypatch.setattr(end.side, "on_gpu", True)
    found = Contents(end.side)
    assert found.piece_bytes > PIECE_BYTES
    num_slots = 3 * found.piece_bytes // end.side.kv[0, :, 0].nbytes
    row = StepRow(row=3, generation=1, length=num_slots)
    entry = StepEntry(kind=EntryKind.EXTEND, step=1, rows=(row,))
    sizes = [found._nbytes(part, entry) for x in found.plan.outward(entry) for part in x.parts]
    assert PIECE_BYTES < max(sizes) <= found.piece_bytes
    assert found.most_bytes >= found.piece_bytes


def test_the_first_decode_step_behind_a_prompt_has_its_table() -> None:
    """The radix tree may have replaced its slots; of rows taken up records have told them."""
    plan = Contents(End("oracle", has_all=False).side).plan

    def tables() -> list[int]:
        return [
            part.row
            for message in plan.outward(DECODE)
            for part in message.parts
            if part.kind is PartKind.TABLE
        ]

    rows = [row.row for row in DECODE.rows]
    prompt = StepEntry(kind=EntryKind.EXTEND, step=1, rows=DECODE.rows)
    assert tables() == []
    for _ in range(2):
        plan.outward(prompt)
        assert (tables(), tables()) == (rows, [])
    plan.outward(prompt)
    plan.outward(StepEntry(kind=EntryKind.RESUME, step=2, rows=DECODE.rows))
    assert tables() == []


def test_lanes_keep_nothing_of_messages_that_do_not_recur() -> None:
    link = Way("queued", "oracle")
    kept = []
    for _ in range(3):
        link.carry(EXTEND)
        link.carry(DECODE)
        link.carry(DECODE)
        kept.append((len(link.send._bodies), len(link.receive._bodies)))
    assert kept[0] == kept[1] == kept[2]


def test_long_messages_are_cut() -> None:
    end = End("oracle", has_all=False)
    contents = Contents(end.side)
    per_slot = end.side.kv[0, :, 0].nbytes
    num_slots = 3 * PIECE_BYTES // per_slot + 5
    row = StepRow(row=3, generation=1, length=num_slots)
    messages = contents.plan.outward(StepEntry(kind=EntryKind.EXTEND, step=1, rows=(row,)))
    parts = [part for message in messages for part in message.parts]
    assert max(part.num * per_slot for part in parts if part.kind is PartKind.KV) <= PIECE_BYTES
    waits, raises = (
        [flag for message in messages for flag in getattr(message, name)]
        for name in ("waits", "raises")
    )
    assert waits == raises
    assert len(messages) > len(waits)


@POLICIES
@pytest.mark.parametrize("piece", [64, 1024, PIECE_BYTES])
def test_a_lane_has_room_for_every_message(
    policy: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is asked for beside a wait may come only when that ends."""
    monkeypatch.setattr(contents, "PIECE_BYTES", piece)
    found = Contents(End(policy, has_all=False).side)
    rows = tuple(StepRow(row=row, generation=1, length=64, window=4) for row in range(1, NUM_ROWS))
    for kind in (EntryKind.EXTEND, EntryKind.GROW, EntryKind.DECODE):
        entry = StepEntry(kind=kind, step=1, variant=SELECTING, rows=rows)
        found.begin(entry)
        messages = (*found.plan.outward(entry), *found.plan.back(entry))
        sizes = [len(found.make(message).whole) for message in messages]
        assert max(sizes) <= found.most_bytes
        longest = max(len(found.make(Message((), (p,))).whole) for m in messages for p in m.parts)
        assert max(sizes) <= max(longest, piece + HEAD_BYTES)


def test_a_step_is_announced_behind_all_of_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "PIECE_BYTES", 64)
    end, told = End("oracle", has_all=False), Announced()
    sent, written = Contents(end.side).plan, Contents(end.side)
    lane = HostReceiveLane(end.side, written)
    receiver = FarReceiver(end.side, written.plan, Queue(), lane, told)  # type: ignore[arg-type]
    nothing = torch.empty(0, dtype=torch.uint8)
    for entry in (EXTEND, replace(DECODE, step=8)):
        num_tables = 0
        messages = sent.outward(entry)
        receiver._begin(entry)
        for message in messages:
            num_tables += sum(part.kind is PartKind.TABLE for part in message.parts)
            assert told.steps.empty()
            receiver._apply(Record(Op.MESSAGE, 0, 0, nothing))
            if any(flag.kind is FlagKind.BEGIN for flag in message.raises):
                break
        assert num_tables == 1
        assert told.steps.get_nowait()[0] == entry
        while not lane.is_done:
            receiver._apply(Record(Op.MESSAGE, 0, 0, nothing))
        assert told.steps.empty()


@WAYS
def test_windows_of_many_requests_are_cut(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message without an end would be one that the other host refuses."""
    monkeypatch.setattr(contents, "PIECE_BYTES", 256)
    link = Way(way, "oracle")
    windows = [
        part
        for message in link.messages(EXTEND)
        for part in message.parts
        if part.kind is PartKind.WINDOWS
    ]
    assert any(part.first for part in windows)
    link.carry(EXTEND)
    num = sum(row.window for row in EXTEND.rows)
    for layer in {part.layer for part in windows}:
        assert sum(part.num for part in windows if part.layer == layer) == num
        want, found = (seed_buffer(end.tensors, layer)[:num] for end in (link.source, link.target))
        assert torch.equal(found, want)
        assert want.any()


@pytest.mark.parametrize(
    "record",
    [
        Record(Op.MESSAGE, 8, 0, torch.zeros(64, dtype=torch.uint8)),
        Record(Op.MESSAGE, 7, 0, torch.zeros(48, dtype=torch.uint8)),
        Record(Op.MESSAGE, 7, 99, torch.zeros(64, dtype=torch.uint8)),
        Record(Op.MESSAGE, 7, 0, torch.zeros(0, dtype=torch.uint8)),
    ],
    ids=["another step", "another size", "more rows than may change", "nothing"],
)
def test_what_is_no_message_of_the_step_is_refused(record: Record) -> None:
    link = Way("records", "oracle")
    link.receive.begin(DECODE, link.messages(DECODE))
    with pytest.raises(ProtocolError):
        link.receive.take(record)


@pytest.mark.parametrize(
    ("request_", "said"), [((5, 9, 1), "row"), ((1, 65, 1), "length"), ((1, 9, 257), "slot")]
)
def test_requests_beyond_the_memory_are_refused(request_: tuple[int, int, int], said: str) -> None:
    end = End("oracle", has_all=False)
    with pytest.raises(ProtocolError, match=said):
        end.side.check_requests(*torch.tensor(request_)[:, None])


def test_the_end_of_a_step_without_messages_is_told_to_a_gpu_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a rehearsal, or requests that are taken up: the next forward pass waits for it."""
    end = End("look_ahead", has_all=False)
    monkeypatch.setattr(end.side, "on_gpu", True)
    monkeypatch.setattr(end.side, "settle", lambda: None)
    plane, nothing = Queue(), torch.empty(0, dtype=torch.uint8)
    progress = Progress(end.side)
    receiver = NearReceiver(end.side, Contents(end.side).plan, plane, None, progress)  # type: ignore[arg-type]
    receiver._apply(Record(Op.RAISE, end.side.at.FINISHED, 7, nothing))
    assert end.flags.finished.tolist() == [7]
    assert end.side.flags.value(end.side.at.FINISHED) == 7


def test_a_rehearsal_that_was_broken_off_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lane has captured nothing."""
    end = End("look_ahead", has_all=False)
    monkeypatch.setattr(end.side, "on_gpu", True)
    monkeypatch.setattr(end.side, "settle", lambda: None)
    monkeypatch.setattr(end.side, "is_over", lambda: True)
    lane = SimpleNamespace(is_queued=True)
    progress = Progress(end.side)
    receiver = NearReceiver(end.side, Contents(end.side).plan, Queue(), lane, progress)  # type: ignore[arg-type]
    receiver.expect(StepEntry(kind=EntryKind.PREPARE, step=7, rows=ROWS))
    nothing = torch.empty(0, dtype=torch.uint8)
    receiver._apply(Record(Op.RAISE, end.side.at.FINISHED, 7, nothing))
    assert end.flags.finished.tolist() == [0]
    assert end.side.flags.value(end.side.at.FINISHED) == 0


def test_kernels_are_loaded_for_wherever_books_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton has one for addresses that are multiples of 16 bytes, and one for others."""
    end, seen = End("oracle", has_all=False), set[int]()
    books = torch.zeros(len(end.program.selecting), 3, 1, 5, dtype=torch.int32)
    monkeypatch.setattr(
        contents, "take_changed_rows", lambda positions, *_: seen.add(positions.data_ptr() % 16)
    )
    Contents(end.side, books).rehearse()
    assert seen == {book.data_ptr() % 16 for book in books}
    assert len(seen) > 1
