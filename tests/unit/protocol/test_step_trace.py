# SPDX-License-Identifier: Apache-2.0
"""Traces of a cache rank's steps, as the inference rank asks for them."""

from __future__ import annotations

import gzip
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tandemkv.cache_rank.protocol import step_trace
from tandemkv.cache_rank.protocol.step_trace import TRACE_VARIABLE, traced_beside, tracer


def tracer_of(folder: Path, device: str = "cpu") -> Iterator[None]:
    found = tracer(0, torch.device(device), {TRACE_VARIABLE: str(folder)})
    assert found is not None
    return found


@contextmanager
def stepping(traced: Iterator[None]) -> Iterator[Callable[[], None]]:
    """Look and do steps in a thread; yields what waits for one more step."""
    over, wanted, done = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        while not over.is_set():
            next(traced)
            if wanted.wait(0.001):
                torch.ones(3).add_(1)
                wanted.clear()
                done.set()

    def step() -> None:
        done.clear()
        wanted.set()
        assert done.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield step
    finally:
        over.set()
        thread.join()


def test_nothing_is_traced_unless_the_variable_is_set() -> None:
    assert tracer(0, torch.device("cpu"), {}) is None


def events_of(path: Path) -> list[str]:
    return [each["name"] for each in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


def test_steps_of_the_body_are_traced_and_no_others(tmp_path: Path) -> None:
    """Twice, into a folder in which an earlier run was broken off."""
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "first_engine0.running").touch()
    with stepping(tracer_of(folder)) as step:
        for name, count in (("first", 2), ("second", 3)):
            step()
            with traced_beside(folder, name, 1):
                for _ in range(count):
                    step()
            step()
            assert events_of(folder / f"{name}_engine0.json.gz").count("aten::add_") == count
    assert len(list(folder.iterdir())) == 2


def test_a_trace_that_fails_is_told_of_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("CUPTI is used\nby another process")

    monkeypatch.setattr(torch.profiler, "profile", refuse)
    with stepping(tracer_of(tmp_path)) as step, traced_beside(tmp_path, "decode", 1):
        step()
    assert caplog.messages == [
        "steps are not traced: RuntimeError: CUPTI is used by another process"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no CUDA")
def test_gpu_kernels_that_cannot_be_traced_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with stepping(tracer_of(tmp_path, "cuda")), traced_beside(tmp_path, "decode", 1):
        pass
    assert len(caplog.messages) == 1


def test_who_does_not_answer_has_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_trace, "_ANSWER_S", 0.05)
    with traced_beside(tmp_path / "traces", "decode", 1):
        pass
    assert caplog.messages == ["a cache rank has not begun its trace in 0.05 s"]


def test_a_trace_that_is_wanted_no_more_ends_no_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name goes after it was seen; or the folder does, while steps are traced."""
    wanted, folder, read_text = tmp_path / "traces" / "wanted", tmp_path / "traces", Path.read_text

    def read_late(path: Path, *, encoding: str) -> str:
        path.unlink(missing_ok=True)
        return read_text(path, encoding=encoding)

    folder.mkdir()
    traced = tracer_of(folder)
    wanted.write_text("decode")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", read_late)
        next(traced)
    wanted.write_text("decode")
    next(traced)
    assert (folder / "decode_engine0.running").exists()
    shutil.rmtree(folder)
    next(traced)
