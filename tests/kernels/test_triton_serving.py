# SPDX-License-Identifier: Apache-2.0
"""RoPE and paged attention on a GPU; interpreted where there is none.

The cases run in a process of their own, for the reason that `own_process` gives.
"""

from pathlib import Path

import pytest
import torch
from own_process import run_cases
from tolerances import TOLERANCES, assert_close

from tandemkv.kernels.attention import attend_paged

pytest.importorskip("triton")


@pytest.mark.timeout(900)  # interpreted, minutes on a busy core
def test_triton_kernels_equal_the_references(tmp_path: Path) -> None:
    run_cases("triton_serving_cases.py", tmp_path)


@pytest.mark.gpu
def test_a_replayed_graph_follows_the_lengths() -> None:
    torch.manual_seed(2)
    k_pool, v_pool = torch.randn(2, 9000, 2, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.stack([torch.randperm(9000)[:8000] for _ in range(2)]).cuda()
    hi = torch.tensor([8000, 10], device="cuda")
    attend_paged(q, k_pool, v_pool, slots, hi, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend_paged(q, k_pool, v_pool, slots, hi, scale=0.1)
    hi.copy_(torch.tensor([77, 6000]))
    graph.replay()
    want = attend_paged(q.cpu(), k_pool.cpu(), v_pool.cpu(), slots.cpu(), hi.cpu(), scale=0.1)
    assert_close(out, want[0], TOLERANCES[torch.bfloat16])
    assert_close(lse, want[1], TOLERANCES[torch.bfloat16])
