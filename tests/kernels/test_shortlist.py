# SPDX-License-Identifier: Apache-2.0
"""Shortlists: the reference against float64, and the Triton kernels, interpreted without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandemkv.kernels.shortlist import choose_shortlisted, store_shortlist

CASES = Path(__file__).with_name("triton_shortlist_cases.py")


def test_triton_kernels_equal_the_references(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout


def choose(
    listed: list[int], *, covered: int, hi: int, k: int, num_new: int = 4, step: int = 1
) -> tuple[list[int], list[float], bool, torch.Tensor]:
    """Choose for one request with one KV head, two query heads and pages of 4 in reverse order."""
    torch.manual_seed(0)
    q, pool = torch.randn(1, 2, 8), torch.randn(40, 1, 8)
    slots = torch.arange(9, -1, -1, dtype=torch.int32)[None]
    positions = torch.full((2, 1, 8), -1, dtype=torch.int32)
    positions[1, 0, : len(listed)] = torch.tensor(listed, dtype=torch.int32)
    due = torch.zeros(1, dtype=torch.bool)
    chosen, scores = choose_shortlisted(
        q, pool, slots, positions, torch.tensor([0, covered], dtype=torch.int32),
        torch.tensor([1]), torch.tensor([2], dtype=torch.int32),
        torch.tensor([hi], dtype=torch.int32), k, num_new=num_new,
        active=torch.ones(1, dtype=torch.bool), step=torch.tensor(step, dtype=torch.int32),
        every=4, phase=0, due=due, scale=0.5, page_size=4,
    )  # fmt: skip
    slot = [slots[0, p // 4] * 4 + p % 4 for p in range(40)]
    keys = torch.stack([pool[s, 0] for s in slot]).double()
    return chosen[0, 0].tolist(), scores[0, 0].tolist(), bool(due), q[0].double() @ keys.T * 0.5


def test_the_best_of_list_and_newcomers_by_hand() -> None:
    # 1 lies before the candidates, 30 behind them; 12 and 13 came since the scan.
    chosen, scores, due, logits = choose([1, 9, 4, 30, 7], covered=12, hi=14, k=3)
    candidates = [4, 7, 9, 12, 13]
    want = logits[:, candidates].softmax(-1).mean(0)
    order = want.argsort(descending=True)[:3]
    assert sorted(chosen) == sorted(candidates[i] for i in order)
    assert sorted(scores) == pytest.approx(sorted(want[order].tolist()), rel=1e-5)
    assert not due


def test_of_many_newcomers_the_newest_and_a_scan_is_due() -> None:
    chosen, _, due, _ = choose([3, 5], covered=10, hi=20, k=9, num_new=4)
    assert sorted(chosen) == [-1, -1, -1, 3, 5, 16, 17, 18, 19]
    assert due
    assert choose([3, 5], covered=19, hi=20, k=9, step=8)[2]  # every fourth step


def test_what_was_not_due_stays() -> None:
    positions, covered = torch.zeros(3, 1, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    found = torch.tensor([[[5, 6]], [[7, 8]]], dtype=torch.int32)
    store_shortlist(
        found, torch.tensor([20, 30], dtype=torch.int32), torch.tensor([False, True]),
        torch.tensor([1, 2]), positions, covered,
    )  # fmt: skip
    assert positions[:, 0].tolist() == [[0, 0], [0, 0], [7, 8]]
    assert covered.tolist() == [0, 0, 30]


def test_errors_say_what_is_required() -> None:
    with pytest.raises(ValueError, match=r"num_new=0: must be >= 1"):
        choose([3], covered=4, hi=9, k=1, num_new=0)
