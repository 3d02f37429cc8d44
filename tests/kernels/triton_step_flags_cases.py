# SPDX-License-Identifier: Apache-2.0
"""Flags with step numbers, and appends; run by `test_triton_ops` in a process of its own."""

import pytest
import torch
from plain_torch import in_plain_torch

from tandemkv.kernels.step_flags import StepWait
from tandemkv.kernels.triton_ops import append as triton_append
from tandemkv.kernels.triton_ops import step_flags as triton_step_flags

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
append, step_flags = in_plain_torch("append"), in_plain_torch("step_flags")
BOTH = (step_flags, triton_step_flags)


def word(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


def _wrapped(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("lost", [0, 4])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 7), (3, 64), (5, 5000)])
def test_rows_arrive_with_their_flags(lost: int, rows: int, width: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(rows, 2 * width, device=DEVICE)[:, :width]
    out, raised = torch.zeros(2, rows + 1, width, device=DEVICE), []
    for index, module in enumerate(BOTH):
        flags = torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE)
        module.send_rows(hidden, out[index, :rows], flags[:rows], step=word(9), lost=word(lost))
        raised.append(flags.tolist())
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[1, :rows], torch.zeros_like(hidden) if lost else hidden)
    assert raised[0] == raised[1] == [0 if lost else 9] * rows + [0]


@pytest.mark.parametrize(
    ("raised", "step", "before", "after"),
    [
        ([], 3, 0, 0),
        ([3, 3, 3], 3, 0, 0),
        ([7, 3, 4], 3, 0, 0),
        ([3, 2, 3], 3, 0, 3),  # one is missing
        ([3, 2, 3], 3, 1, 1),  # nothing is waited for any more
        ([-(2**31) + 1], 2**31 - 2, 0, 0),  # numbers wrap around
        ([2**31 - 2], -(2**31) + 1, 0, -(2**31) + 1),
        ([2**31 - 2], -(2**31), 0, -(2**31)),
        ([-1], 0, 0, -1),  # 0 would be no loss
    ],
)
def test_a_wait_compares_step_numbers(
    raised: list[int], step: int, before: int, after: int
) -> None:
    for module in BOTH:
        flags = torch.tensor([*raised, 0], dtype=torch.int32, device=DEVICE)[: len(raised)]
        for stamp in (None, word(8)):
            lost = word(before)
            module.wait_flags(flags, step=word(step), lost=lost, timeout_s=0.01, stamp=stamp)
            assert lost.item() == after, module.__name__
            assert flags.tolist() == raised  # never taken down
        assert stamp is not None
        # Not this step's, and of no later one.
        assert stamp.item() == (step if not after else _wrapped(step - 1)), module.__name__


def test_flags_are_raised_unless_the_epoch_is_lost() -> None:
    for module in BOTH:
        flags = torch.zeros(6, dtype=torch.int32, device=DEVICE)
        module.raise_flags(flags[:2], step=word(5), lost=word(0), follows=False, stamp=None)
        module.raise_flags(flags[3:5], step=word(6), lost=word(1), follows=True, stamp=None)
        assert flags.tolist() == [5, 5, 0, 0, 0, 0]
        module.raise_flags(flags[3:5], step=word(6), lost=word(0), follows=True, stamp=None)
        assert flags.tolist() == [5, 5, 0, 6, 6, 0]


@pytest.mark.parametrize("num_flags", [0, 3])
@pytest.mark.parametrize(
    ("step", "stamp", "before", "after"),
    [
        (5, 5, 0, 0),
        (5, 6, 0, 0),
        (5, 4, 0, 5),
        (5, 0, 0, 5),
        (5, 4, 2, 2),
        (5, 5, 2, 2),
        (0, -1, 0, -1),
    ],
)
def test_flags_are_raised_for_what_was_stamped(
    step: int, stamp: int, before: int, after: int, num_flags: int
) -> None:
    for module in BOTH:
        flags, lost = torch.zeros(4, dtype=torch.int32, device=DEVICE) - 9, word(before)
        up = flags[:num_flags]
        module.raise_flags(up, step=word(step), lost=lost, follows=False, stamp=word(stamp))
        assert lost.item() == after, module.__name__
        assert flags.tolist() == [-9 if after else step] * num_flags + [-9] * (4 - num_flags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_appended_tokens(dtype: torch.dtype, index: torch.dtype) -> None:
    torch.manual_seed(1)
    k, v = torch.randn(2, 3, 4, 10, device=DEVICE).to(dtype).transpose(1, 2)[:, :, :2]
    rows = torch.tensor([4, 1, 3, 1], device=DEVICE, dtype=index)
    slots = torch.tensor([0, 6, 2, 5], device=DEVICE, dtype=index)
    want = torch.zeros(2, 5, 7, 2, 10, device=DEVICE, dtype=dtype)
    got = want.clone()
    append.append_tokens(k, v, rows, slots, *want, moves=None)
    triton_append.append_tokens(k, v, rows, slots, *got, moves=None)
    assert torch.equal(got, want)
    assert want.count_nonzero() == 2 * 4 * 2 * 10


@pytest.mark.parametrize("num_reqs", [0, 3])
@pytest.mark.parametrize(
    ("raised", "before", "after"),
    [([3, 5], 0, 0), ([3, 2], 0, 3), ([3, 2], 1, 1)],
)
def test_an_append_waits_for_a_step(
    num_reqs: int, raised: list[int], before: int, after: int
) -> None:
    k, v = torch.randn(2, num_reqs, 2, 10, device=DEVICE)
    rows = torch.arange(num_reqs, device=DEVICE)
    for module in (append, triton_append):
        flags, lost = torch.tensor(raised, dtype=torch.int32, device=DEVICE), word(before)
        wait = StepWait(flags=flags, step=word(3), lost=lost, timeout_s=0.01)
        resident = torch.zeros(2, 4, 7, 2, 10, device=DEVICE)
        module.append_tokens(k, v, rows, rows, *resident, moves=None, awaited=wait)
        assert lost.item() == after, module.__name__
        assert flags.tolist() == raised
        assert torch.equal(resident[0, rows, rows], k)  # also where the step is lost
        assert torch.equal(resident[1, rows, rows], v)
