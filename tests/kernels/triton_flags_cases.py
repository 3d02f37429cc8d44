# SPDX-License-Identifier: Apache-2.0
"""Flags and appends in Triton; run by `test_triton_flags` in its own process."""

import pytest
import torch

from tandemkv.kernels.reference import append, flags
from tandemkv.kernels.triton_ops import append as triton_append
from tandemkv.kernels.triton_ops import flags as triton_flags

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 7), (3, 64), (5, 5000)])
def test_rows_arrive_with_their_flags(
    dtype: torch.dtype, with_residual: bool, rows: int, width: int
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(rows, 2 * width, device=DEVICE).to(dtype)[:, :width]
    residual = torch.randn(rows, width, device=DEVICE).to(dtype) if with_residual else None
    out, raised = torch.zeros(2, rows + 1, width, device=DEVICE, dtype=dtype), []
    for index, module in enumerate((flags, triton_flags)):
        up = torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE)
        module.send_rows(hidden, residual, out[index, :rows], up[:rows])
        raised.append(up)
    assert torch.equal(out[0], out[1])
    assert raised[1].tolist() == raised[0].tolist() == [1] * rows + [0]


@pytest.mark.parametrize("num", [0, 1, 5, 36])
def test_a_wait_takes_down_what_was_raised(num: int) -> None:
    up = torch.zeros(num + 1, dtype=torch.int32, device=DEVICE)
    triton_flags.raise_flags(up[:num])
    assert up.tolist() == [1] * num + [0]
    up[num] = 1
    triton_flags.wait_flags(up[:num], timeout_s=5.0)
    assert up.tolist() == [0] * num + [1]


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


@pytest.mark.parametrize("num_flags", [1, 3])
@pytest.mark.parametrize("num_reqs", [0, 3])
def test_an_append_waits_for_flags(num_flags: int, num_reqs: int) -> None:
    k, v = torch.randn(2, num_reqs, 2, 10, device=DEVICE)
    rows = torch.arange(num_reqs, device=DEVICE)
    up = torch.zeros(num_flags + 1, dtype=torch.int32, device=DEVICE)
    triton_flags.raise_flags(up)
    resident = torch.zeros(2, 4, 7, 2, 10, device=DEVICE)
    triton_append.append_tokens(k, v, rows, rows, *resident, moves=None, awaited=up[:num_flags])
    assert up.tolist() == [0] * num_flags + [1]
    assert torch.equal(resident[0, rows, rows], k)
    assert torch.equal(resident[1, rows, rows], v)
