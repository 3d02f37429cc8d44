# SPDX-License-Identifier: Apache-2.0
"""What is called to capture on a GPU, and what cannot be captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tape import NotCapturedError, Tape

from tandemkv.cache_rank.pump import captured_steps
from tandemkv.cache_rank.pump.captured_steps import CapturedSteps

_STREAM: Any = SimpleNamespace(cuda_stream=5)


class Graph:
    """Notes what is called."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.result: Any = 0

    def capture_begin(self, *, pool: int, capture_error_mode: str) -> None:
        self.said.append(("begin", pool, capture_error_mode))

    def capture_end(self) -> None:
        self.said.append("end")

    def raw_cuda_graph_exec(self) -> int:
        return 3

    def replay(self) -> None:
        self.said.append("replay")


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    def refuse(*_: object) -> None:
        pytest.fail("lanes keep memory for what is made on the way, and wait for each other")

    def upload(executable: int, stream: int) -> tuple[int]:
        graph.said.append(("upload", executable, stream))
        return (graph.result,)

    graph, results = Graph(), SimpleNamespace(CUDA_SUCCESS=0)
    driver = SimpleNamespace(CUgraphExec=int, CUstream=int, CUresult=results, cuGraphUpload=upload)
    monkeypatch.setattr(captured_steps, "import_module", {"cuda.bindings.driver": driver}.get)
    for name, found in (
        ("CUDAGraph", lambda: graph), ("graph_pool_handle", lambda: 7), ("stream", nullcontext),
        ("synchronize", refuse), ("empty_cache", refuse),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, found)
    return graph


def test_a_capture_waits_for_nothing_and_gives_no_memory_back(graph: Graph) -> None:
    steps = CapturedSteps(_STREAM)
    steps.capture((2, 1), (), lambda: graph.said.append("body"))
    assert graph.said == [("begin", 7, "thread_local"), "body", "end", ("upload", 3, 5)]
    steps.replay((2, 1))
    assert graph.said[-1] == "replay"


def test_a_capture_that_is_broken_off_has_an_end(graph: Graph) -> None:
    """Else torch's memory stays that of a capture for the epochs to come."""
    steps = CapturedSteps(_STREAM)

    def body() -> None:
        raise ValueError("the epoch is over")

    with pytest.raises(ValueError, match="the epoch is over"):
        steps.capture((2, 1), (), body)
    assert graph.said[-1] == "end"
    with pytest.raises(KeyError):
        steps.replay((2, 1))


def test_a_graph_without_memory_is_told(graph: Graph) -> None:
    graph.result = SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        CapturedSteps(_STREAM).capture((2, 1), (), lambda: None)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: int(x[0]),
        lambda x: bool((x > 1).any()),
        lambda x: x[x > 1],
        lambda x: x.masked_fill_(x > 1, 0)[x > 1],
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor([1, 2, 3]),
        lambda x: x + torch.tensor(1),
        lambda x: x.cpu(),
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
    ],
)
def test_what_cannot_be_captured_is_refused(body: Callable[[torch.Tensor], object]) -> None:
    numbers = torch.arange(3)
    with pytest.raises(NotCapturedError):
        Tape().record(lambda: body(numbers) and None)  # type: ignore[arg-type,func-returns-value]
    assert Tape.active is None


def test_what_can_be_captured_is_played_with_the_numbers_of_the_step() -> None:
    numbers, place, out = torch.arange(3), torch.tensor([2]), torch.zeros(3, dtype=torch.int64)

    def body() -> None:
        kept = torch.where(numbers > 1, numbers, 0)
        out[place] = kept[place] + 1
        out[0] = 9

    tape = Tape().record(body)
    numbers.mul_(10)
    place.fill_(1)
    out.zero_()
    tape.play()
    assert out.tolist() == [9, 11, 0]
