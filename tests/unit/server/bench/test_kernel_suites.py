# SPDX-License-Identifier: Apache-2.0
"""The kernels' benchmarks on a CPU, in small: their inputs fit, and their checks can fail.

On a CPU the kernels' references run; nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tandemkv.server.evaluation.bench import kernels_score, kernels_select
from tandemkv.server.evaluation.bench.report import BenchError
from tandemkv.server.evaluation.spread import Spread


def run_once(calls: Sequence[Callable[[], Any]], *, repetitions: int = 50) -> Spread:
    for call in calls:
        call()
    return Spread.of([1.0, 2.0, 3.0])


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernels_score, kernels_select):
        monkeypatch.setattr(module, "require_cuda", lambda: torch.device("cpu"))
        monkeypatch.setattr(module, "time_graph", run_once)
        monkeypatch.setattr(module, "NUM_REQS", 2)
        monkeypatch.setattr(module, "PAGE", 16)
    monkeypatch.setattr(kernels_score, "num_rotations", lambda _: 2)
    monkeypatch.setattr(kernels_score, "LENGTHS", (256,))
    for name, value in (("K", 64), ("RESIDENT", 132), ("CAP", 8), ("MISSING", 16), ("LAYERS", 2)):
        monkeypatch.setattr(kernels_select, name, value)
    monkeypatch.setattr(kernels_select, "num_rotations", lambda _: 1)
    for name in ("_time_select", "_time_topk", "_time_mirror", "_time_exchange"):
        whole = getattr(kernels_select, name)
        monkeypatch.setattr(kernels_select, name, lambda _, device, whole=whole: whole(512, device))


def test_selection_rows() -> None:
    found = [row.figure for row in kernels_select.rows()[1:]]
    assert found == [
        "score_topk_int4_2x0k_us", "topk_positions_2x0k_us", "topk_positions_2x0k_us",
        "mirror_diff_2x0k_us", "exchange_rows_2x8_us",
        "exchange_rows_2x8_bandwidth",
    ]  # fmt: skip


def test_score_rows() -> None:
    rows = kernels_score.rows()
    assert len(rows) == 3 * 2
    assert rows[0].figure == "score_keys_native_2x0k_us"
    assert [row.unit for row in rows] == ["us", "GB/s"] * 3


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, out: torch.Tensor, **__: Any) -> None:
        out.fill_(1.0)

    monkeypatch.setattr(kernels_score, "score_keys", wrong)
    with pytest.raises(BenchError, match="not timed"):
        kernels_score.rows()
    monkeypatch.setattr(kernels_select, "exchange_rows", lambda *_, **__: None)
    with pytest.raises(BenchError, match="exchange_rows differs"):
        kernels_select.rows()
