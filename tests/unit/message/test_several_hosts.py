# SPDX-License-Identifier: Apache-2.0
"""Several cache ranks by messages: their pumps beside the model map one pool, each for its heads.

As between GPUs, played on a CPU (`two_hosts`). Of three KV heads one cache rank has one, the other
two.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from two_hosts import COLD, DECODE, EXTEND, MODEL, POLICIES, WAYS, End, Way, step_slots

from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.head_shard import HeadShard, parts_of
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes
from tandemkv.cache_rank.protocol.models.model_spec import part_of
from tandemkv.cache_rank.protocol.step_ring import EntryKind, StepEntry
from tandemkv.cache_rank.pump.contents import Contents
from tandemkv.cache_rank.pump.near import NearReceiver, Progress
from tandemkv.cache_rank.pump.plan import Flag, FlagKind
from tandemkv.cache_rank.pump.records import Op, Record
from tandemkv.cache_rank.pump.session import PumpSession
from tandemkv.inference_rank.links.base import DecodeRows
from tandemkv.inference_rank.links.signals import StreamSignals

UNEVEN = msgspec.structs.replace(MODEL, num_qo_heads=6, num_kv_heads=3)
SHARDS = parts_of(2, 3)
KIND = DecodeKind.SELECTING
SIZE = len(DECODE.rows)


@dataclass
class Host:
    """A cache rank: the memory beside the model that its pump maps, and that of its own host."""

    shard: HeadShard
    near: End
    far: End

    @property
    def ends(self) -> tuple[End, End]:
        return self.near, self.far


def hosts_of(policy: str, *, is_back: bool = False) -> list[Host]:
    """Return both, with memory that is filled at random where messages come from."""
    found: list[Host] = []
    for shard in SHARDS:
        kept = found[0].near.kept if found else None
        near = End(policy, has_all=not is_back, model=UNEVEN, near=shard, kept=kept)
        far = End(policy, has_all=is_back, model=part_of(UNEVEN, shard))
        found.append(Host(shard, near, far))
    if is_back:  # requests that the hosts of both know
        for host in found:
            host.far.side.table.copy_(found[0].far.side.table)
            host.near.side.table.copy_(found[0].far.side.table)
    return found


def out(way: str, policy: str, host: Host) -> Way:
    return Way(way, policy, ends=host.ends)


def back(way: str, policy: str, host: Host) -> Way:
    return Way(way, policy, ends=(host.far, host.near), is_back=True)


def test_beside_the_model_all_heads_are_in_one_pool() -> None:
    first, second = hosts_of("oracle")
    assert first.near.tensors["kv"].shape[3] == 3
    assert first.near.tensors["kv"].data_ptr() == second.near.tensors["kv"].data_ptr()
    assert [host.near.side.kv.shape[3] for host in (first, second)] == [1, 2]
    assert [host.far.tensors["kv"].shape[3] for host in (first, second)] == [1, 2]
    for name in ("queries", "streams", "to_engine", "step_rows"):
        assert first.near.tensors[name].data_ptr() != second.near.tensors[name].data_ptr()


@POLICIES
@WAYS
def test_each_host_gets_the_k_and_v_and_the_queries_of_its_heads(way: str, policy: str) -> None:
    for host in hosts_of(policy):
        near, far = host.ends
        out(way, policy, host).carry(DECODE)
        slots = step_slots(near)
        assert step_slots(far) == slots
        theirs = host.shard.of(near.kept["kv"], 3)[:, :, slots]
        assert torch.equal(far.tensors["kv"][:, :, slots], theirs)
        assert far.tensors["kv"].count_nonzero() == theirs.count_nonzero()
        heads = host.shard.part(UNEVEN.num_qo_heads)
        assert far.tensors["queries"].shape[2] == near.tensors["queries"].shape[2] == heads


@WAYS
def test_a_prompt_goes_out_and_the_sets_of_all_heads_come_back(way: str) -> None:
    (row,), hosts = EXTEND.rows, hosts_of("oracle")
    slots = hosts[0].near.side.table[3, row.prefix_len : row.length].long()
    for host in hosts:
        out(way, "oracle", host).carry(EXTEND)
        assert torch.equal(host.far.side.table[3, :40], host.near.side.table[3, :40])
        theirs = host.shard.of(host.near.kept["kv"], 3)[:, :, slots]
        assert torch.equal(host.far.side.kv[:, :, slots], theirs)
    hosts = hosts_of("oracle", is_back=True)
    for host in hosts:
        back(way, "oracle", host).carry(EXTEND)
    near = hosts[0].near
    for name, number in (("resident_k", 0), ("resident_v", 1)):
        whole = torch.cat([host.far.side.resident[number][:, 3] for host in hosts], dim=2)
        for layer in range(UNEVEN.num_layers):
            found = near.kept[name][layer, 3, : whole.shape[1]]
            assert torch.equal(found, whole[layer]) is near.program.is_sparse_layer(layer)


@POLICIES
@WAYS
def test_rows_of_each_host_come_to_the_places_of_its_heads(way: str, policy: str) -> None:
    hosts = hosts_of(policy, is_back=True)
    near, changed = hosts[0].near, 0
    for host in hosts:
        far, start = host.far, host.shard.bounds[0]
        link = back(way, policy, host)
        for layer in far.program.selecting:
            far.positions[far.program.book_of(layer), 3, -1, 5] += 1  # of its last head
        link.carry(DECODE)
        head = start + far.positions.shape[2] - 1
        for layer in far.program.selecting:
            for name, ours in zip(("resident_k", "resident_v"), far.side.resident, strict=True):
                assert torch.equal(near.kept[name][layer, 3, 5, head], ours[layer, 3, 5, -1])
        changed += len(far.program.selecting) * UNEVEN.head_dim
        assert near.kept["resident_k"].count_nonzero() == changed, "and nowhere else"
        weights = host.shard.of(near.kept["sample_log_weight"], 2)
        layers = far.program.selecting
        assert torch.equal(weights[layers, 3], far.side.log_weight[layers, 3])
        rows = [each.tensors["remote_outputs"][:SIZE] for each in host.ends]
        assert torch.equal(*rows)


@dataclass
class Connection:
    """What the link's side asks of the connection to a pump."""

    tensors: Any
    shard: HeadShard
    lost_reason: str | None = None
    end_waits: Any = None

    def announce(self, entry: StepEntry) -> None:
        del entry

    def mark_lost(self, reason: str) -> None:
        self.lost_reason = reason

    def is_lost(self) -> bool:
        return self.lost_reason is not None


@pytest.mark.parametrize("way", ["queued", "captured"], indirect=True)
@pytest.mark.parametrize("num_answers", [1, 2])
def test_the_forward_pass_goes_on_once_all_have_answered(way: str, num_answers: int) -> None:
    """From its queries to the flags that it polls: those of both lie side by side."""
    hosts = hosts_of("oracle", is_back=True)
    connections = [Connection(host.near.tensors, host.shard) for host in hosts]
    outs = [out(way, "oracle", host) for host in hosts]
    backs = [back(way, "oracle", host) for host in hosts]
    link: Any = StreamSignals(connections, UNEVEN.num_layers, timeout_s=0.02)  # type: ignore[arg-type]
    kept = hosts[0].near.kept
    kept["to_inference"].fill_(6)  # the step before has ended
    rows, lengths = (torch.tensor([getattr(x, n) for x in DECODE.rows]) for n in ("row", "length"))
    told = DecodeRows(
        rows=rows, lengths=lengths, lengths_on_host=lengths, req_to_token=kept["req_to_token"],
        num_cold=COLD,
    )  # fmt: skip
    assert link.begin(DECODE, told)
    program = hosts[0].near.program
    asked = [x for x in range(UNEVEN.num_layers) if program.awaits(KIND, x)]
    exact = [x for x in range(UNEVEN.num_layers) if program.attends_remotely(KIND, x)]
    assert exact == [2]
    queries = torch.randn(UNEVEN.num_layers, SIZE, UNEVEN.num_qo_heads, UNEVEN.head_dim)
    for layer in (*asked, *exact):
        link.put_query(layer, queries[layer])
    link.raise_end()
    for host, outward, homeward in zip(hosts, outs, backs, strict=True):
        messages = outward.messages(DECODE)
        assert not outward.send.begin(DECODE, messages)
        outward.receive.begin(DECODE, messages)
        assert outward.is_raised(Flag(FlagKind.END), DECODE.step)
        assert host.far.tensors["step_rows"][:SIZE].tolist() == rows.tolist()
        for layer in (*asked, *exact):
            theirs = host.shard.of(queries[layer], 1)
            assert torch.equal(host.far.tensors["queries"][layer, :SIZE], theirs)
        if host.shard.index < num_answers:
            homeward.carry(DECODE)
    for layer in asked:
        link.await_ready(layer)
    link.await_output(2, SIZE)
    link.end()
    assert link.lost_step == (0 if num_answers == 2 else DECODE.step)
    if num_answers == 2:
        assert link.begin(StepEntry(kind=EntryKind.DECODE, step=8, rows=DECODE.rows), told)


def test_the_end_of_a_step_without_messages_is_that_of_its_own_cache_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = hosts_of("oracle")[1]
    side = host.near.side
    monkeypatch.setattr(side, "on_gpu", True)
    monkeypatch.setattr(side, "settle", lambda: None)
    lane: Any = SimpleNamespace(is_queued=True)
    receiver = NearReceiver(side, Contents(side).plan, None, lane, Progress(side))  # type: ignore[arg-type]
    receiver._apply(Record(Op.RAISE, side.at.FINISHED, 7, torch.empty(0, dtype=torch.uint8)))
    assert host.near.kept["to_inference"][0, :2].tolist() == [0, 7]


@pytest.mark.parametrize("here", [torch.device("cpu"), torch.device("cuda", 1)], ids=str)
def test_threads_of_a_pump_work_on_its_gpu(
    here: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a second tensor-parallel rank is not the one that a thread begins with."""
    current: list[tuple[int, torch.device]] = []

    def set_device(device: torch.device) -> None:
        current.append((threading.get_ident(), device))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    tensors: Any = SimpleNamespace(homes=Homes(inference=here, engine=here, here=here))
    tensors.close = lambda: None
    unused: Any = SimpleNamespace(abort=lambda _: None, close=lambda: None, breaks_with=[])
    unused.watches = lambda _: ()
    session, worked = PumpSession(1, unused, unused, (tensors,)), list[int]()
    session.start(unused, *[lambda: worked.append(threading.get_ident())] * 2)
    session.close()
    assert len(worked) == 2
    assert set(current) == (set() if here.type == "cpu" else {(x, here) for x in worked})
