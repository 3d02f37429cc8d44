# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on the largest figure."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tandemkv.cache_rank.protocol.all_reduce import all_reduce_max

FIGURES = ([1.5, float("inf"), 3.0], [2.5, 1.0, -1.0])


def run_rank(rank: int, store: Path, results: Any) -> None:
    """Be one of two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results.put(all_reduce_max(dist.group.WORLD, FIGURES[rank]))
    dist.destroy_process_group()


def test_both_get_the_largest(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=run_rank, args=(r, tmp_path / "s", results)) for r in (0, 1)]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert found == [[2.5, float("inf"), 3.0]] * 2


def test_one_rank_keeps_its_own() -> None:
    assert all_reduce_max(None, FIGURES[0]) == FIGURES[0]
