# SPDX-License-Identifier: Apache-2.0
"""Aborts of SGLang's scheduler and HTTP process end the request that is meant."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_world import World
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler import Scheduler

from tandemkv.inference_rank.sglang import aborts
from tandemkv.inference_rank.sglang.aborts import around_abort, around_abort_task


class _Grammars:
    def __init__(self, *waiting: Any) -> None:
        self.grammar_queue, self.ended = list(waiting), list[Any]()

    def abort_requests(self, recv_req: Any) -> None:
        """As `GrammarManager.abort_requests`."""
        self.ended += [r for r in self.grammar_queue if r.rid.startswith(recv_req.rid)]


def _world() -> Any:
    """Requests ``a`` and ``a1`` decode, ``a12`` is in the middle of its prompt, ``ab`` waits."""
    world: Any = World(chunk=32)
    world.disaggregation_mode, world.dllm_config = DisaggregationMode.NULL, None
    world.enable_hicache_storage, world.ps = False, SimpleNamespace(pp_size=1)
    for rid, length in (("a", 5), ("a1", 6)):
        world.add(list(range(1, length)), 40).rid = rid
    for turn in range(4):
        if turn == 2:
            world.add(list(range(1, 90)), 4).rid = "a12"
        batch = world.next_batch()
        world.take(batch, world.launch(batch))
        world.last_batch = batch
    world.add([1, 2, 3], 4).rid = "ab"
    world.grammar_manager = _Grammars(SimpleNamespace(rid="ac"))
    assert world.chunked_req.rid == "a12"
    return world


def _ended(world: Any) -> dict[str, bool]:
    at_once = {out.rid for out in world.sent}
    return {r.rid: r.to_finish is not None or r.rid in at_once for r in world.requests}


@pytest.mark.parametrize("name", ["a", "a1", "ab"])
def test_ids_that_begin_alike_are_others(name: str) -> None:
    world = _world()
    around_abort(Scheduler.abort_request, world, AbortReq(rid=name))
    assert _ended(world) == {rid: rid == name for rid in ("a", "a1", "a12", "ab")}
    assert world._pending_chunked_abort_req is None
    assert [r.rid for r in world.waiting_queue] == ([] if name == "ab" else ["ab"])
    assert world.grammar_manager.ended == []


def test_all_are_aborted_if_all_are_meant() -> None:
    world = _world()
    around_abort(Scheduler.abort_request, world, AbortReq(rid="", abort_all=True))
    assert world._pending_chunked_abort_req is world.chunked_req
    assert all(_ended(world).values())


@pytest.mark.parametrize("is_same", [True, False])
def test_a_later_request_of_the_same_id_is_another(
    is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aborts, "_GRACE_S", 0.0)
    aborted: list[str] = []
    ended = SimpleNamespace(rid="a", is_single=True)
    present = ended if is_same else SimpleNamespace(rid="a", is_single=True)
    manager = SimpleNamespace(
        rid_to_state={"a": SimpleNamespace(obj=present)}, abort_request=aborted.append
    )
    asyncio.run(around_abort_task(lambda *_: None, manager, ended)())
    assert aborted == (["a"] if is_same else [])


def test_each_of_several_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aborts, "_GRACE_S", 0.0)
    aborted: list[str] = []
    manager = SimpleNamespace(rid_to_state={}, abort_request=aborted.append)
    several = SimpleNamespace(rid=["a", "b"], is_single=False)
    asyncio.run(around_abort_task(lambda *_: None, manager, several)())
    assert aborted == ["a", "b"]
