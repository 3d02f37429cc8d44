# SPDX-License-Identifier: Apache-2.0
"""Paged attention in a CUDA graph; `test_triton_ops` runs its other cases."""

import pytest
import torch
from tolerances import TOLERANCES, assert_close

from tandemkv.kernels.attention import attend_paged

pytest.importorskip("triton")


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
