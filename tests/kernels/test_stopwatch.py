# SPDX-License-Identifier: Apache-2.0
"""What is timed on a GPU, played on a CPU: captured once and replayed, or launched anew."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.kernels import stopwatch

GPU = torch.device("cuda", 0)


class Event:
    """Two of them are a millisecond apart."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        """Nothing is under way."""

    def elapsed_time(self, _: Event) -> float:
        return 1.0


@pytest.mark.parametrize("is_captured", [True, False])
def test_what_waits_for_the_device_is_not_captured(
    is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    graph = SimpleNamespace(
        replay=lambda: done.append("replay"), reset=lambda: done.append("reset")
    )

    def capture(found: Any, **_: Any) -> AbstractContextManager[None]:
        assert found is graph
        done.append("capture")
        return nullcontext()

    fake = SimpleNamespace(
        device=lambda _: nullcontext(), stream=lambda _: nullcontext(), Event=Event,
        current_stream=lambda: None, synchronize=lambda _: None, CUDAGraph=lambda: graph,
        graph=capture,
    )  # fmt: skip
    monkeypatch.setattr(stopwatch.torch, "cuda", fake)
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(stopwatch, "shared_stream", lambda *_: stream)
    found = stopwatch.median_us(
        lambda: done.append("run"), GPU, prepare=lambda: done.append("prepare"), budget_s=0.0,
        is_captured=is_captured,
    )  # fmt: skip
    assert found == 1000.0
    loaded = ["prepare", "run"] * 2
    if is_captured:
        assert done == [*loaded, "capture", "run", "prepare", "replay", "reset"]
    else:
        assert done == [*loaded, "prepare", "run"]
