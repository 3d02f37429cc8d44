# SPDX-License-Identifier: Apache-2.0
"""The driver script's split prefill, run with a stand-in for SGLang's module."""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path

import pytest
import sglang
import torch

from tandemkv.server.evaluation.bench.one_batch import write_driver


class Request:
    def __init__(self, row: int, length: int) -> None:
        self.req_pool_idx = row
        self.full_untruncated_fill_ids = list(range(length))
        self.prefix_indices = torch.zeros(0, dtype=torch.int64)
        self.extend: tuple[int, int] = (0, length)

    def set_extend_range(self, start: int, end: int) -> None:
        self.extend = (start, end)


def run_driver(monkeypatch: pytest.MonkeyPatch, folder: Path, chunk: int) -> types.ModuleType:
    """Load the driver; return the stand-in module whose ``extend`` it may have replaced."""
    stand_in = types.ModuleType("sglang.benchmark.one_batch")
    stand_in.seen = []  # type: ignore[attr-defined]

    def extend(reqs: list[Request], model_runner: object) -> str:
        stand_in.seen.append([req.extend for req in reqs])  # type: ignore[attr-defined]
        return "tokens"

    stand_in.extend = extend  # type: ignore[attr-defined]
    benchmark = types.ModuleType("sglang.benchmark")
    benchmark.one_batch = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.benchmark", benchmark)
    monkeypatch.setitem(sys.modules, "sglang.benchmark.one_batch", stand_in)
    # Where the real one has been imported before, the package's attribute is what is found.
    monkeypatch.setattr(sglang, "benchmark", benchmark, raising=False)
    monkeypatch.setenv("BENCH_LOAD_PLUGINS", "0")
    monkeypatch.setenv("BENCH_PREFILL_CHUNK", str(chunk))
    write_driver(folder)
    runpy.run_path(str(folder / "one_batch_driver.py"), run_name="__mp_main__")
    return stand_in


def runner() -> types.SimpleNamespace:
    table = torch.arange(30).reshape(3, 10)
    return types.SimpleNamespace(req_to_token_pool=types.SimpleNamespace(req_to_token=table))


def test_prefill_is_split_and_prefixes_are_the_rows_slots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = run_driver(monkeypatch, tmp_path, chunk=8)  # 4 tokens of each of 2 requests
    reqs = [Request(1, 10), Request(2, 10)]
    assert module.extend(reqs, runner()) == "tokens"
    assert module.seen == [[(0, 4)] * 2, [(4, 8)] * 2, [(8, 10)] * 2]
    assert reqs[1].prefix_indices.tolist() == list(range(20, 28))


@pytest.mark.parametrize("chunk", [0, 20, 100])
def test_a_batch_that_fits_one_chunk_is_prefilled_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chunk: int
) -> None:
    module = run_driver(monkeypatch, tmp_path, chunk)
    module.extend([Request(1, 10), Request(2, 10)], runner())
    assert module.seen == [[(0, 10), (0, 10)]]
