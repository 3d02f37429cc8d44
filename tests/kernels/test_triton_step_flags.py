# SPDX-License-Identifier: Apache-2.0
"""Flags that hold step numbers; interpreted where there is no GPU."""

import time
from pathlib import Path

import pytest
import torch
from own_process import run_cases

from tandemkv.kernels.step_flags import raise_flags, send_rows, wait_flags

pytest.importorskip("triton")


def words(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_triton_kernels_equal_the_references(tmp_path: Path) -> None:
    run_cases("triton_step_flags_cases.py", tmp_path)


def test_bad_arguments() -> None:
    step, lost = words(1), words(0)
    with pytest.raises(ValueError, match="timeout_s=0"):
        wait_flags(words(0), step=step, lost=lost, timeout_s=0)
    with pytest.raises(ValueError, match="flags"):
        raise_flags(words(0).long(), step=step, lost=lost)
    with pytest.raises(ValueError, match="lost"):
        raise_flags(words(0), step=step, lost=words(0, 0))
    with pytest.raises(ValueError, match="out"):
        send_rows(torch.ones(2, 3), None, torch.ones(2, 4), words(0, 0), step=step, lost=lost)


@pytest.mark.gpu
def test_a_wait_ends_at_its_limit_and_later_ones_at_once() -> None:
    flags, step, lost = (words(x, device="cuda") for x in (0, 1, 1))
    wait_flags(flags, step=step, lost=lost, timeout_s=1.0)  # compiled
    lost.zero_()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(100):
        wait_flags(flags, step=step, lost=lost, timeout_s=0.3)
    raise_flags(flags, step=step, lost=lost)
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    assert 0.29 < took < 0.9, "one wait lasts, 99 do not"
    assert (lost.item(), flags.item()) == (1, 0)
    assert (torch.ones(4, device="cuda") + 1).tolist() == [2.0] * 4  # the context is usable


@pytest.mark.gpu
def test_a_wait_ends_when_the_host_says_that_the_epoch_is_lost() -> None:
    flags, step, lost = (words(x, device="cuda") for x in (0, 1, 1))
    wait_flags(flags, step=step, lost=lost, timeout_s=1.0)
    lost.zero_()
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    began = time.perf_counter()
    wait_flags(flags, step=step, lost=lost, timeout_s=20.0)
    with torch.cuda.stream(other):
        lost.fill_(7)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 5.0
    assert lost.item() == 7
