# SPDX-License-Identifier: Apache-2.0
"""Samples in Triton; run by `test_triton_ops` in a process of its own."""

import math

import pytest
import torch
from plain_torch import in_plain_torch
from tolerances import TOLERANCES, assert_close

from tandemkv.kernels.append import SampleMoves
from tandemkv.kernels.samples import make_sample_scratch
from tandemkv.kernels.triton_ops import append as triton_append
from tandemkv.kernels.triton_ops import samples as triton_samples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
append, samples = in_plain_torch("append"), in_plain_torch("samples")
# The interpreter multiplies bfloat16 as if its bits were integers.
MULTIPLIED = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.mark.parametrize("num_samples", [2, 6, 32])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_tables(num_samples: int, index: torch.dtype) -> None:
    lengths = torch.tensor([1, 8, 9, 40, 41, 129, 130, 500], dtype=index, device=DEVICE)
    rows = torch.arange(8, device=DEVICE).flip(0).to(index)
    table = torch.randint(1, 9999, (8, 600), device=DEVICE).int()
    want, got = torch.full((2, 9, num_samples), 5, dtype=torch.int32, device=DEVICE)
    for module, slots in ((samples, want), (triton_samples, got)):
        module.load_sample_slots(rows, lengths, table, slots, num_sink=3, num_recent=5)
    assert torch.equal(got, want)
    sizes = {"num_sink": 3, "num_resident": 20, "num_recent": 5, "num_dense": 25}
    found = torch.full((4, 9), 5, dtype=torch.int64, device=DEVICE)
    for start in range(1, 400, 8):
        lengths = torch.arange(start, start + 8, device=DEVICE).to(index)
        samples.load_sample_moves(lengths, *found[:2], num_samples=num_samples, **sizes)
        triton_samples.load_sample_moves(lengths, *found[2:], num_samples=num_samples, **sizes)
        assert torch.equal(found[:2], found[2:])


@pytest.mark.parametrize("dtype", MULTIPLIED)
@pytest.mark.parametrize(("group", "dim", "num_samples"), [(1, 8, 6), (3, 24, 32), (4, 64, 130)])
def test_attention(dtype: torch.dtype, group: int, dim: int, num_samples: int) -> None:
    torch.manual_seed(num_samples)
    heads, num_slots, num_reqs = 2, 200, 4
    q = torch.randn(num_reqs, heads * group, dim, device=DEVICE).to(dtype)
    k, v = torch.randn(2, num_slots, heads, dim, device=DEVICE).to(dtype)
    slots = torch.randint(0, num_slots - 1, (num_reqs, num_samples), device=DEVICE).int()
    weight = 2 * torch.randn(5, heads, num_samples, device=DEVICE)
    weight[torch.rand(weight.shape, device=DEVICE) < 0.3] = -math.inf
    weight[1, 0] = -math.inf
    weight[1, :, 0], slots[0, 0] = -math.inf, num_slots - 1
    k[-1], v[-1] = math.nan, math.nan
    rows = torch.tensor([1, 4, 2, 0], device=DEVICE)
    active = torch.tensor([True, True, False, True], device=DEVICE)
    lse = torch.randn(num_reqs, heads * group, device=DEVICE)
    lse[3] = -math.inf
    start = torch.randn(num_reqs, heads * group, dim, device=DEVICE).to(dtype)
    start[3] = math.nan
    want = start.clone()
    arguments = (slots, rows, weight, active)
    samples.attend_samples(q, k, v, *arguments, want, lse, scale=dim**-0.5, lse_unit=math.log(2.0))
    scratch = make_sample_scratch(num_reqs + 1, heads * group, num_samples, dim, DEVICE)
    for has_begun in (False, True):  # what a call leaves in the scratch is no matter to the next
        got = start.clone()
        if has_begun:
            scratch.fill_(math.nan)
            triton_samples.begin_samples(q, k, v, *arguments, scale=dim**-0.5, scratch=scratch)
        triton_samples.attend_samples(
            q, k, v, *arguments, got, lse, scale=dim**-0.5, lse_unit=math.log(2.0),
            scratch=scratch, has_begun=has_begun,
        )  # fmt: skip
        assert_close(got, want.double(), TOLERANCES[dtype])
    assert torch.equal(got[2], start[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_become_samples_before_they_are_overwritten(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    k, v = torch.randn(2, 3, 2, 10, device=DEVICE).to(dtype)
    rows, slots = torch.tensor([[4, 1, 3], [0, 6, 2]], device=DEVICE)
    moved, sources = torch.tensor([[2, -1, 0], [0, 5, 3]], device=DEVICE)
    start = torch.randn(2, 5, 7, 2, 10, device=DEVICE).to(dtype)
    found = []
    for module in (append, triton_append):
        resident = start.clone()
        kept = torch.zeros(2, 5, 3, 2, 10, device=DEVICE, dtype=dtype)
        moves = SampleMoves(k=kept[0], v=kept[1], samples=moved, sources=sources)
        module.append_tokens(k, v, rows, slots, *resident, moves=moves)
        found.append((resident, kept))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[1][1][:, 4, 2], start[:, 4, 0])
    assert found[1][1].count_nonzero() == 2 * 2 * 2 * 10
