# SPDX-License-Identifier: Apache-2.0
"""Norm, RoPE, paged and causal attention on a GPU; interpreted where there is none.

The cases run in a process of their own, for the reason that `own_process` gives.
"""

from pathlib import Path

import pytest
import torch
from own_process import run_cases
from tolerances import TOLERANCES, assert_close

from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.causal_attention import attend_causal
from tandemkv.kernels.library_ops import causal_attention as fused
from tandemkv.kernels.reference import causal_attention as reference

pytest.importorskip("triton")


def test_triton_kernels_equal_the_references(tmp_path: Path) -> None:
    run_cases("triton_serving_cases.py", tmp_path)


@pytest.mark.parametrize(
    ("num_queries", "num_tokens"), [(0, 3), (1, 1), (1, 70), (5, 5), (60, 177), (130, 131)]
)
def test_fused_causal_attention_equals_the_reference(num_queries: int, num_tokens: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(num_queries, 6, 16).to(torch.bfloat16)
    k, v = torch.randn(2, num_tokens, 2, 16).to(torch.bfloat16)
    want = reference.attend_causal(q.double(), k.double(), v.double(), scale=0.3)
    assert_close(fused.attend_causal(q, k, v, scale=0.3), want, TOLERANCES[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_queries", "num_tokens"), [(1, 700), (513, 513), (600, 3777)])
def test_causal_attention_on_a_gpu(dtype: torch.dtype, num_queries: int, num_tokens: int) -> None:
    torch.manual_seed(1)
    q = torch.randn(num_queries, 8, 128).to(dtype)
    k, v = torch.randn(2, num_tokens, 2, 128).to(dtype)
    want = reference.attend_causal(q.double(), k.double(), v.double(), scale=0.1)
    out = attend_causal(q.cuda(), k.cuda(), v.cuda(), scale=0.1)
    assert_close(out, want, TOLERANCES[dtype])


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
