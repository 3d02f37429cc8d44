# SPDX-License-Identifier: Apache-2.0
"""Kernels of a selection that are launched while the one before runs do what they do else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from query_inputs import query_inputs, with_int8
from score_inputs import make_keys, scan_of

from tandemkv.kernels import streams
from tandemkv.kernels.exchange import SampleWeights, exchange_rows
from tandemkv.kernels.mirror import make_mirror_scratch, mirror_diff
from tandemkv.kernels.query import predict_query
from tandemkv.kernels.select import make_select_scratch, score_topk
from tandemkv.kernels.triton_ops import query as triton_query

REQS, HEADS, GROUP, DIM, HIDDEN, PAGE, SAMPLES = 3, 2, 4, 64, 512, 64, 16


def replays(width: int, device: torch.device, *, num_steps: int) -> list[torch.Tensor]:
    """Select for two layers in each of some steps; returns books, sets, weights and counts.

    On a GPU by a captured graph. Queries change from step to step, and with them what is fetched.
    """
    torch.manual_seed(width)
    budget, sink, cap = 96, 4, 16
    resident, num_pages = sink + 2 * budget, REQS * width // PAGE
    generator = torch.Generator(device).manual_seed(7)
    keys = [
        make_keys(
            "int4", num_reqs=REQS, heads=HEADS, group=GROUP, dim=DIM, page_size=PAGE,
            num_pages=num_pages, device=str(device),
        )
        for _ in range(2)
    ]  # fmt: skip
    shape = REQS, HIDDEN, HEADS * GROUP, DIM
    given = with_int8(
        query_inputs(shape, torch.bfloat16, str(device), has_bias=False, has_norm=True)
    )
    hidden = torch.zeros_like(given.hidden)

    def empty(*sizes: int, dtype: torch.dtype, value: float = 0) -> torch.Tensor:
        return torch.full(sizes, value, dtype=dtype, device=device)

    kv = torch.randn(2, num_pages * PAGE, HEADS, DIM, generator=generator, device=device).bfloat16()
    res = empty(2, 2, REQS + 1, resident, HEADS, DIM, dtype=torch.bfloat16)
    books = torch.arange(resident, device=device, dtype=torch.int32)
    books = books.expand(2, REQS + 1, HEADS, resident).contiguous()
    used = torch.full_like(books, -1)
    local, carried = (empty(REQS + 1, HEADS, SAMPLES, dtype=torch.float32) for _ in range(2))
    rows = torch.tensor([3, 1, 2], device=device)
    lo = empty(REQS, dtype=torch.int32, value=sink)
    hi = torch.tensor([width - 64, width - 70, width // 2], dtype=torch.int32, device=device)
    target = empty(REQS, dtype=torch.int32, value=resident)
    active = torch.tensor([True, True, False], device=device)
    step, counters = empty(1, dtype=torch.int32)[0], empty(4, dtype=torch.int64)
    scratch = make_select_scratch(REQS, HEADS * GROUP, HEADS, width, budget, device)
    mirror_scratch = make_mirror_scratch(REQS, HEADS, width, device, may_repeat=False)

    def select() -> None:
        step.add_(1)
        for layer, own in enumerate(keys):
            query = predict_query(hidden, given.positions, given.weights, given.cos_sin)
            scan = replace(
                scan_of(own, lo, hi, width=width, scale=DIM**-0.5, active=active), q=query
            )
            chosen, scores = score_topk(scan, budget, scratch=scratch)
            fetched = mirror_diff(
                chosen, books[layer], used[layer], step=step, num_protected=sink,
                num_target=target, hi=hi, fetch_cap=cap, selected_scores=scores,
                active=active, rows=rows, counters=counters, log_weight=local,
                scratch=mirror_scratch,
            )  # fmt: skip
            weights = SampleWeights(source=local, target=carried, active=active)
            for _ in range(2):  # a copy behind a copy
                exchange_rows(
                    *kv, own.table, *fetched, *res[layer], rows, page_size=PAGE, weights=weights
                )

    graph = None
    if device.type == "cuda":
        state = (books, used, res, local, carried, counters, step)
        before = [tensor.clone() for tensor in state]
        select()  # compiles
        for tensor, first in zip(state, before, strict=True):
            tensor.copy_(first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            select()
    for _ in range(num_steps):
        hidden.normal_(generator=generator)
        select() if graph is None else graph.replay()
    return [books, used, res, carried, counters]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 16384], ids=["every candidate listed", "filtered"])
def test_chained_kernels_do_what_others_do(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(streams, "_chained", set())
    tiles = triton_query.TILES  # where they are the same, so is the order of sums
    monkeypatch.setitem(tiles, "int8 alone", tiles["int8"])
    alone = replays(width, device, num_steps=200)
    streams.let_chain(device)
    chained = replays(width, device, num_steps=200)
    assert int(alone[-1][2]) > 0, "rows were fetched"
    for one, other in zip(alone, chained, strict=True):
        assert torch.equal(one, other)
