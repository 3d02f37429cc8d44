# SPDX-License-Identifier: Apache-2.0
"""Triton kernels against the references; run by `test_triton_ops` in a process of its own."""

import math

import pytest
import torch
from tolerances import assert_close

from tandemkv.kernels.reference import merge
from tandemkv.kernels.triton_ops import merge as triton_merge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    outs = torch.randn(2, 6, 3, 10, device=DEVICE).to(dtype)
    logs = (torch.randn(2, 6, 3) * 4).to(DEVICE)
    logs[0, 1], logs[1, 2], logs[:, 3] = -math.inf, -math.inf, -math.inf
    logs[0, 4], logs[1, 4] = 1e38, -1e38
    outs[0, 1], outs[1, 2], outs[:, 3] = math.nan, math.nan, math.nan
    outs[1] = outs[1].flip(-1)
    want = merge.merge_attention(outs[0], logs[0], outs[1], logs[1])
    got = triton_merge.merge_attention(outs[0], logs[0], outs[1], logs[1])
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])
    assert got[0].dtype == dtype
