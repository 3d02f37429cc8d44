# SPDX-License-Identifier: Apache-2.0
"""Selection in one layer: scores and choice, top-k, difference to what is resident, exchange.

8 requests, 8 KV heads, K = 1024, a resident set of 2052 rows and at most 64 fetched rows per head,
the defaults. Results are compared with their references before anything is timed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tandemkv.kernels.exchange import exchange_rows
from tandemkv.kernels.mirror import make_mirror_scratch, mirror_diff
from tandemkv.kernels.reference.mirror import mirror_diff as mirror_reference
from tandemkv.kernels.reference.select import score_topk as select_reference
from tandemkv.kernels.select import make_select_scratch, score_topk
from tandemkv.kernels.topk import make_topk_scratch, topk_positions
from tandemkv.server.evaluation.provenance import BenchError
from tandemkv.server.evaluation.timing import num_rotations, require_cuda, time_graph

from .kernels_score import NUM_RECENT, QO_HEADS, TOLERANCE, make_index
from .report import Row

NUM_REQS, HEADS, HEAD_DIM, PAGE = 8, 8, 128, 64
K, NUM_SINK, RESIDENT, CAP = 1024, 4, 2052, 64
CODED = 1 / 16
"""What a code of a byte is apart from the share of a head that it stands for, at most."""
MISSING = 160
"""Selected tokens that are not resident: 16 % of K, measured on a model at c = 2."""
LAYERS = 12


def rows() -> list[Row]:
    """Time `score_topk`, `topk_positions`, `mirror_diff` and `exchange_rows`, per layer."""
    device = require_cuda()
    torch.manual_seed(0)
    found = [_time_select(length, device) for length in (32768, 65536)]
    found += [_time_topk(length, device) for length in (32768, 65536)]
    found.append(_time_mirror(65536, device))
    found += _time_exchange(32768, device)
    return found


def _time_select(length: int, device: torch.device) -> Row:
    num_pages = NUM_REQS * length // PAGE + 1
    first = make_index("int4", num_pages, device)
    num_bytes = sum(part.nbytes for part in first if part is not None)
    pools = [
        first,
        *(make_index("int4", num_pages, device) for _ in range(num_rotations(num_bytes))),
    ]
    table = (torch.randperm(num_pages - 1, device=device).int() + 1).view(NUM_REQS, -1)
    q = torch.randn(NUM_REQS, QO_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    lo = torch.full((NUM_REQS,), NUM_SINK, dtype=torch.int32, device=device)
    hi = torch.full((NUM_REQS,), length - NUM_RECENT, dtype=torch.int32, device=device)
    scratch = make_select_scratch(NUM_REQS, QO_HEADS, HEADS, length, K, device)
    options: dict[str, Any] = {"width": length, "scale": HEAD_DIM**-0.5, "page_size": PAGE}

    def run(keys: torch.Tensor, k_scale: torch.Tensor | None) -> torch.Tensor:
        return score_topk(
            q, keys, table, lo, hi, K, k_scale=k_scale, scratch=scratch, **options
        )[1]  # fmt: skip

    got = run(*first)[:1].sort(-1).values
    want = select_reference(
        q[:1], first[0], table, lo[:1], hi[:1], K, k_scale=first[1], **options
    )[1].sort(-1).values  # fmt: skip
    error = float((got - want).abs().max() / want.max())
    _require(error < TOLERANCE + CODED, "score_topk")
    timing = time_graph([partial(run, *pool) for pool in pools])
    return Row.of(f"score_topk_int4_{NUM_REQS}x{length // 1024}k_us", timing, "us")


def _time_topk(length: int, device: torch.device) -> Row:
    shape = (NUM_REQS, HEADS, length)
    layers = [torch.randn(shape, device=device) for _ in range(LAYERS)]
    lo = torch.full((NUM_REQS,), NUM_SINK, device=device)
    hi = torch.full((NUM_REQS,), length, device=device)
    scratch = make_topk_scratch(NUM_REQS, HEADS, K, device)
    chosen = torch.empty((NUM_REQS, HEADS, K), device=device)

    def run(scores: torch.Tensor) -> None:
        topk_positions(scores, K, lo=lo, hi=hi, sort=False, scratch=scratch, out_scores=chosen)

    run(layers[0])
    want = layers[0][..., NUM_SINK:].topk(K).values
    _require(torch.equal(chosen.sort(descending=True).values, want), "topk_positions")
    timing = time_graph([partial(run, scores) for scores in layers])
    return Row.of(f"topk_positions_{NUM_REQS}x{length // 1024}k_us", timing, "us")


def _time_mirror(length: int, device: torch.device) -> Row:
    """Time the difference; the mirror is put back before each call, which is timed alone too."""
    scratch = make_mirror_scratch(NUM_REQS, HEADS, length, device)
    states = []
    for _ in range(LAYERS):
        order = torch.rand((NUM_REQS, HEADS, length), device=device).argsort(-1).int()
        resident = order[..., :RESIDENT].contiguous()
        outside = order[..., RESIDENT : RESIDENT + MISSING]
        selected = torch.cat([resident[..., MISSING - K :], outside], -1).contiguous()
        used = torch.randint(0, 999, resident.shape, device=device, dtype=torch.int32)
        scores = torch.randn(selected.shape, device=device)
        states.append((selected, scores, resident, used, resident.clone(), used.clone()))
    options: dict[str, Any] = {
        "step": torch.tensor([1000], dtype=torch.int32, device=device).expand(NUM_REQS),
        "num_protected": NUM_SINK,
        "num_target": torch.full((NUM_REQS,), RESIDENT, device=device),
        "hi": torch.full((NUM_REQS,), length, device=device),
        "lo": 0,
        "fetch_cap": CAP,
    }
    selected, scores, resident, used, *_ = states[0]
    ours, theirs = [resident.clone(), used.clone()], [resident.clone(), used.clone()]
    got = mirror_diff(selected, *ours, **options, selected_scores=scores, scratch=scratch)
    want = mirror_reference(selected, *theirs, **options, selected_scores=scores)
    _require(all(map(torch.equal, (*got, *ours), (*want, *theirs))), "mirror_diff")

    def restore(layer: int) -> None:
        _, _, resident, used, now_resident, now_used = states[layer]
        now_resident.copy_(resident)
        now_used.copy_(used)

    kept: list[object] = []  # results stay allocated while the graph lives, as layers' do

    def step(layer: int) -> None:
        restore(layer)
        selected, scores, _, _, now_resident, now_used = states[layer]
        kept.append(
            mirror_diff(
                selected, now_resident, now_used, **options, selected_scores=scores,
                scratch=scratch,
            )
        )  # fmt: skip

    overhead = time_graph([partial(restore, layer) for layer in range(LAYERS)])
    both = time_graph([partial(step, layer) for layer in range(LAYERS)])
    note = f"{MISSING} of {K} missing; less {overhead.median:.1f} us that restore the input"
    name = f"mirror_diff_{NUM_REQS}x{length // 1024}k_us"
    return Row.of(name, both.minus(overhead.median), "us", note=note)


def _time_exchange(length: int, device: torch.device) -> list[Row]:
    pages = length // PAGE
    pools = torch.randn(
        LAYERS, 2, NUM_REQS * length, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16
    )
    resident = torch.zeros(
        LAYERS, 2, NUM_REQS, RESIDENT, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16
    )
    table = torch.randperm(NUM_REQS * pages, device=device).view(NUM_REQS, pages).int()
    request_rows = torch.randperm(NUM_REQS, device=device)
    keys = torch.rand((LAYERS, NUM_REQS, HEADS, length), device=device)
    fetch = keys.argsort(-1)[..., :CAP].int().contiguous()
    target = keys[..., :RESIDENT].argsort(-1)[..., :CAP].int().contiguous()

    def run(layer: int) -> None:
        k_pool, v_pool = pools[layer]
        k_res, v_res = resident[layer]
        exchange_rows(
            k_pool, v_pool, table, fetch[layer], target[layer], k_res, v_res, request_rows,
            page_size=PAGE,
        )  # fmt: skip

    run(0)
    slots = table.gather(1, (fetch[0] // PAGE).flatten(1).long()).view_as(fetch[0]) * PAGE
    slots = (slots + fetch[0] % PAGE).long()
    head = torch.arange(HEADS, device=device)[None, :, None]
    moved = resident[0, 0][request_rows[:, None, None], target[0].long(), head]
    _require(torch.equal(moved, pools[0, 0][slots, head]), "exchange_rows")
    timing = time_graph([partial(run, layer) for layer in range(LAYERS)])
    num_bytes = 2 * 2 * fetch[0].numel() * HEAD_DIM * 2  # K and V, read and written
    name = f"exchange_rows_{NUM_REQS}x{CAP}"
    return [
        Row.of(f"{name}_us", timing, "us"),
        Row.bandwidth(f"{name}_bandwidth", timing, num_bytes, note="read and written, K and V"),
    ]


def _require(is_equal: bool, name: str) -> None:
    if not is_equal:
        raise BenchError(f"{name} differs from its reference; not timed")
