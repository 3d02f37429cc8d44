# SPDX-License-Identifier: Apache-2.0
"""What hooks on SGLang's scheduler do with the requests that pass them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tandemkv.inference_rank import runtime as runtime_module
from tandemkv.inference_rank.resume.hooks import around_queue, around_release


class _Followed:
    """Stands in for recovery and penalties, and keeps the order of what is asked of them."""

    def __init__(self, *, refuses: bool = False) -> None:
        self._refuses, self.asked = refuses, list[tuple[Any, ...]]()

    def refuses(self, _scheduler: Any, _req: Any) -> bool:
        return self._refuses

    def forget(self, req: Any) -> None:
        self.asked.append(("forget", req))

    def before_release(self, req: Any, tree_cache: Any) -> None:
        self.asked.append(("trim", req, tree_cache))

    def original(self, *args: Any, **kwargs: Any) -> str:
        self.asked.append(("original", *args, *kwargs.items()))
        return "done"


def _enter(monkeypatch: pytest.MonkeyPatch, followed: _Followed) -> None:
    runtime = SimpleNamespace(recovery=followed, penalties=followed)
    monkeypatch.setattr(runtime_module, "_current", runtime)


def test_a_request_that_waits_again_begins_its_penalties_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's own retraction makes them of its tokens from the first on."""
    followed = _Followed()
    _enter(monkeypatch, followed)
    assert around_queue(followed.original, "scheduler", "req", is_retracted=True) == "done"
    want = [("forget", "req"), ("original", "scheduler", "req", ("is_retracted", True))]
    assert followed.asked == want


def test_a_refused_request_is_not_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = _Followed(refuses=True)
    _enter(monkeypatch, followed)
    assert around_queue(followed.original, "scheduler", "req") is None
    assert followed.asked == []


def test_what_passes_under_way_store_is_given_back_before_the_tree_has_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed = _Followed()
    _enter(monkeypatch, followed)
    around_release(followed.original, "req", "tree", is_insert=True)
    assert followed.asked == [
        ("trim", "req", "tree"),
        ("original", "req", "tree", ("is_insert", True)),
    ]


def test_processes_without_a_model_only_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = _Followed()
    monkeypatch.setattr(runtime_module, "_current", None)
    around_queue(followed.original, "scheduler", "req")
    around_release(followed.original, "req", "tree")
    assert [name for name, *_ in followed.asked] == ["original", "original"]
