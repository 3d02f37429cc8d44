# SPDX-License-Identifier: Apache-2.0
"""Selection kernels in CUDA graphs; `test_triton_ops` runs their other cases."""

from collections.abc import Callable

import pytest
import torch

from tandemkv.kernels.dispatch import plain
from tandemkv.kernels.exchange import exchange_rows
from tandemkv.kernels.mirror import make_mirror_scratch, mirror_diff
from tandemkv.kernels.topk import make_topk_scratch

pytest.importorskip("triton")


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a call that has run before (kernels are compiled, nothing is allocated)."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def best_positions(scores: torch.Tensor, lo: int, hi: int, k: int) -> list[int]:
    places = torch.arange(len(scores))
    usable = places[(places >= lo) & (places < hi) & (scores > float("-inf"))]
    order = scores[usable].argsort(descending=True, stable=True)[:k]
    return sorted(usable[order].tolist())


@pytest.mark.gpu
def test_replayed_topk_follows_the_contents() -> None:
    from tandemkv.kernels.triton_ops.topk import topk_positions

    shape, k = (4, 2, 40000), 2048
    scores = torch.empty(shape, device="cuda")
    lo, hi = (torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(2))
    scratch = make_topk_scratch(*shape[:2], k, "cuda")
    found = torch.empty((*shape[:2], k), dtype=torch.int32, device="cuda")

    def call() -> None:
        found.copy_(topk_positions(scores, k, lo=lo, hi=hi, sort=False, scratch=scratch))

    call()
    graph = captured(call)
    for seed, ends in enumerate([(40000, 30011, 4097, 0), (9, 2052, 39999, 4100), (40000,) * 4]):
        torch.manual_seed(seed)
        scores.normal_()
        if seed == 2:
            scores[1].round_()
            scores[2] = 1.0
            scores[3, 0, 5:] = float("nan")
        lo.fill_(4)
        hi.copy_(torch.tensor(ends))
        graph.replay()
        chosen = found.cpu()
        for req, end in enumerate(ends):
            for head in range(2):
                want = best_positions(scores[req, head].cpu(), 4, end, k)
                assert sorted(p for p in chosen[req, head].tolist() if p >= 0) == want


@pytest.mark.gpu
def test_replayed_step_keeps_mirror_and_rows_together() -> None:
    reqs, heads, k, slots, context, cap, dim, page = 3, 2, 512, 1030, 5000, 32, 128, 16
    generator = torch.Generator("cuda").manual_seed(0)
    selected = torch.zeros((reqs, heads, k), dtype=torch.int32, device="cuda")
    scores = torch.zeros(selected.shape, device="cuda")
    active = torch.ones(reqs, dtype=torch.bool, device="cuda")
    hi = torch.zeros(reqs, dtype=torch.int64, device="cuda")
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    target = torch.zeros_like(hi)
    resident = torch.full((2, reqs, heads, slots), -1, dtype=torch.int32, device="cuda")
    used = torch.full_like(resident, -1)
    scratch = make_mirror_scratch(reqs, heads, context, "cuda")
    pools = torch.randn(2, reqs * 320 * page, heads, dim, device="cuda").bfloat16()
    table = torch.randperm(reqs * 320, device="cuda").view(reqs, 320).int()
    rows = torch.tensor([2, 0, 1], device="cuda")
    res = torch.zeros((2, 2, reqs, slots, heads, dim), dtype=torch.bfloat16, device="cuda")
    fetch = torch.zeros((2, reqs, heads, cap), dtype=torch.int32, device="cuda")
    keywords = {
        "step": step, "num_protected": 4, "num_target": target, "hi": hi,
        "fetch_cap": cap, "selected_scores": scores, "active": active,
    }  # fmt: skip

    def call() -> None:
        fetched = mirror_diff(selected, resident[0], used[0], **keywords, scratch=scratch)
        fetch[0].copy_(fetched[0])
        fetch[1].copy_(fetched[1])
        exchange_rows(*pools, table, *fetched, *res[0], rows, page_size=page)

    active.zero_()
    call()
    graph = captured(call)
    assert bool((resident == -1).all())
    for now in range(1, 70):
        order = torch.rand((reqs, heads, context), device="cuda", generator=generator)
        selected.copy_(order.topk(k, sorted=False).indices)
        scores.copy_(torch.randn(scores.shape, device="cuda", generator=generator).round())
        active.copy_(torch.rand(reqs, device="cuda", generator=generator) < 0.8)
        step.fill_(now)
        hi.fill_(context)
        target.fill_(min(slots, 20 * now))
        graph.replay()
        want = plain(mirror_diff)(selected, resident[1], used[1], **keywords)
        plain(exchange_rows)(*pools, table, *want, *res[1], rows, page_size=page)
        assert torch.equal(fetch[0], want[0])
        assert torch.equal(fetch[1], want[1])
        assert torch.equal(resident[0], resident[1])
        assert torch.equal(used[0], used[1])
        assert torch.equal(res[0], res[1])
    assert bool((resident[0] >= 0).all())
