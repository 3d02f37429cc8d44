# SPDX-License-Identifier: Apache-2.0
"""Whether results may be used is asked once their pass has ended, as only then a GPU knows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.utils import GenerationBatchResult

from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.resume.passes import PassLog


class Link:
    """On a GPU: that a wait was given up is known at the end of the pass."""

    def __init__(self) -> None:
        self.pass_step: int | None = None
        self.is_void = self.breaks_off = self.has_ended = False
        self.lost = 2

    def end(self) -> None:
        self.has_ended = True

    def is_done(self, step: int) -> bool:
        return not self.has_ended or step < self.lost

    def rewind(self) -> None:
        """Nothing is left."""


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def log(link: Link) -> PassLog:
    backend: Any = SimpleNamespace(snapshot=tuple, rewind=lambda _: None)
    connection: Any = SimpleNamespace(confirm=lambda _: None)
    return PassLog(connection, link, backend, Counters())


def _batch(number: int) -> Any:
    mode = SimpleNamespace(is_extend=lambda: False)
    return SimpleNamespace(
        device="cuda", sampling_info=None, forward_mode=mode, forward_iter=number
    )


def _run(log: PassLog, link: Link, number: int, result: Any, *, overlap: bool) -> list[int]:
    """Run pass `number`, whose step has the same number; returns those whose results were used."""
    scheduler, batch = SimpleNamespace(enable_overlap=overlap), _batch(number)
    used: list[int] = []

    def launch(_scheduler: Any, _batch: Any) -> Any:
        link.pass_step, link.has_ended = number, False
        return result

    log.take(lambda *_: used.append(number), scheduler, batch, log.run(launch, scheduler, batch))
    return used


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lost_pass_is_dropped_on_a_gpu(
    log: PassLog, link: Link, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SimpleNamespace(synchronize=link.end)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    # Without the overlap scheduler SGLang hands results over before the GPU has them.
    result = SimpleNamespace(copy_done=stream if overlap else None)
    assert _run(log, link, 1, result, overlap=overlap) == [1]
    assert _run(log, link, 2, result, overlap=overlap) == []
    assert [batch.forward_iter for batch in log.dropped] == [2]


def test_a_void_pass_is_waited_for(log: PassLog, link: Link) -> None:
    """It runs through on a GPU, and writes until its end."""
    batch = _batch(1)
    scheduler = SimpleNamespace(enable_overlap=True)

    def launch(_scheduler: Any, _batch: Any) -> Any:
        link.is_void = True
        return SimpleNamespace(copy_done=SimpleNamespace(synchronize=link.end))

    result = log.run(launch, scheduler, batch)
    log.take(lambda *_: None, scheduler, batch, result)
    assert link.has_ended
    assert log.dropped == [batch]


def test_a_pass_ends_on_the_device_that_it_began_on(
    log: PassLog, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang keeps copies of batches that wait for their results: these have another device."""
    began, waits = SimpleNamespace(**vars(_batch(1)) | {"device": "cpu"}), _batch(1)
    result = log.run(
        lambda *_: GenerationBatchResult(), SimpleNamespace(enable_overlap=True), began
    )
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append(device))
    log.await_end(waits, result)
    assert asked == []
