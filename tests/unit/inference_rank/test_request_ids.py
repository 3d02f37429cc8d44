# SPDX-License-Identifier: Apache-2.0
"""An id is taken until SGLang's scheduler has done with its request."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    TokenizedGenerateReqInput,
)

from tandemkv.inference_rank.sglang import versions as sglang_versions
from tandemkv.inference_rank.sglang.request_ids import HeldIds


class _Request:
    """One request, or a batch of several, as SGLang has them."""

    def __init__(self, *rids: str) -> None:
        self.is_single = len(rids) == 1
        self.rid: Any = rids[0] if self.is_single else list(rids)
        self._parts = [] if self.is_single else [SimpleNamespace(rid=rid) for rid in rids]

    def __getitem__(self, place: int) -> Any:
        return self._parts[place]


class _Manager:
    """What `TokenizerManager` does to its requests, as 0.5.17 (`aborts` false) or 0.5.18."""

    def __init__(self, *, aborts: bool) -> None:
        self.ids, self.aborts = HeldIds(aborts=aborts), aborts
        self.rid_to_state: dict[str, Any] = {}
        self.sent: list[Any] = []

    def begin(self, *rids: str, is_sent: bool = True) -> Any:
        """Take one request, or a batch, and send it to the scheduler."""
        obj = _Request(*rids)
        self._init(obj)
        if is_sent:
            parts: list[Any] = [_tokenized(rid) for rid in rids]
            self._dispatch_to_scheduler(parts[0] if obj.is_single else _batch(parts))
        return obj

    def sample(self, obj: Any, rid: str) -> None:
        """Send a sample of a request, whose parts are known no longer then."""
        self.rid_to_state.pop(obj.rid[0], None)
        sample = copy.copy(obj[0])
        sample.rid = rid
        self._init(sample)
        self._dispatch_to_scheduler(_tokenized(rid))

    def _init(self, obj: Any) -> None:
        def init(_manager: Any, obj: Any, _request: Any) -> None:
            is_single = getattr(obj, "is_single", True)
            parts = [obj] if is_single else [obj[place] for place in range(len(obj.rid))]
            self.rid_to_state |= {part.rid: SimpleNamespace(obj=part) for part in parts}

        self.ids.around_init(init, self, obj, None)

    def leave(self, obj: Any) -> None:
        """Forget a request, whose client has left."""

        def discard(_manager: Any, obj: Any) -> None:
            for rid in [obj.rid] if obj.is_single else obj.rid:
                if self.rid_to_state.pop(rid, None) is not None and not self.aborts:
                    self._dispatch_to_scheduler(AbortReq(rid=rid))

        self.ids.around_discard(discard, self, obj)

    def end(self, **reasons: Any) -> None:
        """Take a batch's output from the scheduler: why each request ended, None if it did not."""

        async def handle(_manager: Any, output: Any) -> None:
            for rid, reason in zip(output.rids, output.finished_reasons, strict=True):
                if reason is not None:
                    self.rid_to_state.pop(rid, None)

        output = SimpleNamespace(rids=list(reasons), finished_reasons=list(reasons.values()))
        asyncio.run(self.ids.around_output(handle, self, output))

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        self.ids.around_dispatch(lambda _manager, obj: self.sent.append(obj), self, obj)

    def aborted(self) -> list[str]:
        return [obj.rid for obj in self.sent if isinstance(obj, AbortReq)]


def _tokenized(rid: str) -> Any:
    needed = [item.name for item in msgspec.structs.fields(TokenizedGenerateReqInput)]
    return TokenizedGenerateReqInput(**(dict.fromkeys(needed) | {"rid": rid}))


def _batch(parts: list[Any]) -> Any:
    return BatchTokenizedGenerateReqInput(batch=parts)


@pytest.fixture(params=[False, True], ids=["0.5.17", "0.5.18"])
def manager(request: pytest.FixtureRequest) -> _Manager:
    return _Manager(aborts=request.param)


def _is_taken(manager: _Manager, rid: str) -> bool:
    known = dict(manager.rid_to_state)
    try:
        manager.begin(rid, is_sent=False)
    except ValueError:
        return True
    manager.rid_to_state = known
    return False


def test_an_id_is_taken_until_the_scheduler_has_ended_its_request(manager: _Manager) -> None:
    manager.leave(manager.begin("a"))
    assert manager.aborted() == ["a"]
    assert manager.rid_to_state == {}
    assert _is_taken(manager, "a")
    manager.end(a=None)
    assert _is_taken(manager, "a")
    manager.end(a={"type": "abort"})
    assert not _is_taken(manager, "a")


def test_an_id_is_free_once_its_request_was_taken_from_the_queue(manager: _Manager) -> None:
    manager.leave(manager.begin("a"))
    manager.ids.around_aborted(lambda *_: None, manager, AbortReq(rid="a"))
    assert not _is_taken(manager, "a")


def test_a_taken_id_is_refused_in_the_words_of_sglang(manager: _Manager) -> None:
    manager.leave(manager.begin("a"))
    with pytest.raises(ValueError, match=r"^Duplicate request ID detected: a$"):
        manager.begin("b", "a")
    assert manager.rid_to_state == {}


def test_of_several_each_id_is_taken_for_itself(manager: _Manager) -> None:
    manager.leave(manager.begin("a", "b", "c"))
    assert manager.aborted() == ["a", "b", "c"]
    manager.end(a={"type": "stop"}, b=None)
    assert [rid for rid in "abc" if _is_taken(manager, rid)] == ["b", "c"]


def test_what_never_was_sent_holds_no_id(manager: _Manager) -> None:
    manager.leave(manager.begin("a", is_sent=False))
    assert not _is_taken(manager, "a")


def test_a_health_check_holds_no_id(manager: _Manager) -> None:
    """The scheduler drops it where other requests run, without a word."""
    manager.leave(manager.begin("HEALTH_CHECK_1"))
    assert not _is_taken(manager, "HEALTH_CHECK_1")


def test_a_later_request_of_an_id_is_not_aborted_with_one_that_had_ended() -> None:
    manager = _Manager(aborts=True)
    ended = manager.begin("a")
    manager.end(a={"type": "stop"})
    later = manager.begin("a")
    manager.leave(ended)
    assert manager.aborted() == []
    assert manager.rid_to_state["a"].obj is later


def test_nor_is_one_that_has_an_id_of_a_batch() -> None:
    manager = _Manager(aborts=True)
    batch = manager.begin("a", "b")
    manager.end(a={"type": "stop"}, b=None)
    later = manager.begin("a")
    manager.leave(batch)
    assert manager.aborted() == ["b"]
    assert manager.rid_to_state["a"].obj is later
    assert list(manager.rid_to_state) == ["a"]


def test_samples_of_a_request_are_aborted_with_it() -> None:
    """Each has an id of its own, and their client leaves them all."""
    manager = _Manager(aborts=True)
    request = manager.begin("a", "a2", is_sent=False)
    for rid in ("x", "y"):
        manager.sample(request, rid)
    manager.leave(request)
    assert manager.aborted() == ["x", "y"]
    assert manager.rid_to_state == {}


@pytest.mark.parametrize(("number", "aborts"), [(17, False), (18, True), (19, True), (20, None)])
def test_ids_are_held_where_sglang_forgets_them(
    number: int, aborts: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_versions, "_number", lambda: number)
    hooks = sglang_versions.held_ids()
    assert {target.rpartition(".")[2] for target in hooks} == (
        set()
        if aborts is None
        else {
            "_dispatch_to_scheduler",
            "_init_req_state",
            "_discard_pending_req_states",
            "_handle_batch_output",
            "_handle_abort_req",
        }
    )
    owners: set[Any] = {hook.__self__ for hook in hooks.values()}  # type: ignore[attr-defined]
    assert [owner._aborts for owner in owners] == ([] if aborts is None else [aborts])
