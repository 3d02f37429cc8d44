# SPDX-License-Identifier: Apache-2.0
"""Calls of every operation that has a GPU version, with the sizes and options of serving.

A call takes the device that its tensors are on; what stands in them does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tandemkv.kernels import step_flags
from tandemkv.kernels.append import SampleMoves, append_tokens
from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.changed_rows import put_changed_rows, take_changed_rows
from tandemkv.kernels.exchange import SampleWeights, exchange_rows
from tandemkv.kernels.gather import gather_tokens
from tandemkv.kernels.mirror import make_mirror_scratch, mirror_diff
from tandemkv.kernels.page_bounds import score_pages
from tandemkv.kernels.quantize import append_int4, append_int8, quantize_int4_pages
from tandemkv.kernels.query import QueryWeights, predict_query
from tandemkv.kernels.query_window import push_and_predict
from tandemkv.kernels.samples import (
    attend_samples,
    load_sample_moves,
    load_sample_slots,
    make_sample_scratch,
)
from tandemkv.kernels.score import KeyScan, score_keys, score_window
from tandemkv.kernels.select import score_topk
from tandemkv.kernels.step_flags import StepWait
from tandemkv.kernels.step_tables import CandidateTables, load_attended, load_candidates, load_ring

BATCH, QO_HEADS, KV_HEADS, DIM, HIDDEN, CONTEXT = 8, 32, 8, 128, 4096, 65536
K, RESIDENT, RECENT, SINK, CAP, SAMPLES, LAYERS = 896, 900, 128, 4, 448, 1024, 36
BF16, FP16, FP32, I32, I64 = (
    torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64,
)  # fmt: skip


Launch = Callable[[torch.device], object]


def _append(device: torch.device, *, samples: bool, by_step: bool = False) -> None:
    new = partial(torch.empty, device=device)
    token, sets = (BATCH, KV_HEADS, DIM), (BATCH + 1, RESIDENT + RECENT, KV_HEADS, DIM)
    moves = None
    if samples:
        kept = new(BATCH + 1, SAMPLES, KV_HEADS, DIM, dtype=BF16)
        moves = SampleMoves(
            k=kept, v=kept, samples=new(BATCH, dtype=I64), sources=new(BATCH, dtype=I64)
        )
    awaited = None
    if by_step:
        awaited = StepWait(
            flags=new(1, dtype=I32), step=new(1, dtype=I32), lost=new(1, dtype=I32), timeout_s=1.0
        )
    append_tokens(
        new(token, dtype=BF16), new(token, dtype=BF16), new(BATCH, dtype=I64),
        new(BATCH, dtype=I64), new(sets, dtype=BF16), new(sets, dtype=BF16), moves=moves,
        awaited=awaited,
    )  # fmt: skip


def _attend(
    device: torch.device, *, dtype: torch.dtype = BF16, dim: int = DIM, batch: int = BATCH,
    group: int = 4, page: int = 1,
) -> None:  # fmt: skip
    new = partial(torch.empty, device=device)
    pool = new(4 * CONTEXT, KV_HEADS, dim, dtype=dtype)
    attend_paged(
        new(batch, KV_HEADS * group, dim, dtype=dtype), pool, pool,
        new(batch, CONTEXT // page, dtype=I32), new(batch, dtype=I64), scale=dim**-0.5,
        page_size=page,
    )  # fmt: skip


def _exchange(device: torch.device, *, is_far: bool) -> None:
    new = partial(torch.empty, device=device)
    pool = new(BATCH * CONTEXT, KV_HEADS, DIM, dtype=BF16)
    sets = new(BATCH + 1, RESIDENT, KV_HEADS, DIM, dtype=BF16)
    fetch = new(BATCH, KV_HEADS, CAP, dtype=I32)
    options: dict[str, Any] = {}
    if is_far:
        carried = new(BATCH + 1, KV_HEADS, SAMPLES)
        active = new(BATCH, dtype=torch.bool)
        options["weights"] = SampleWeights(source=carried, target=carried, active=active)
    exchange_rows(
        pool, pool, new(BATCH, CONTEXT // 64, dtype=I32), fetch, fetch, sets, sets,
        new(BATCH, dtype=I64), page_size=64, **options,
    )  # fmt: skip


def _changed_rows(device: torch.device, *, dim: int = DIM, dtype: torch.dtype = BF16) -> None:
    new = partial(torch.empty, device=device)
    books, sets = (BATCH + 1, KV_HEADS, RESIDENT), (BATCH + 1, RESIDENT, KV_HEADS, dim)
    rows, active = new(BATCH, dtype=I64), new(BATCH, dtype=torch.bool)
    k, v = new(sets, dtype=dtype), new(sets, dtype=dtype)
    slots = new(BATCH, KV_HEADS, CAP, dtype=I32)
    k_out, v_out = (new(BATCH, KV_HEADS, CAP, dim, dtype=dtype) for _ in "kv")
    positions, sent = new(books, dtype=I32), new(books, dtype=I32)
    take_changed_rows(positions, sent, k, v, rows, active, slots, k_out, v_out)
    put_changed_rows(slots, k_out, v_out, rows, k, v)


def _gather(device: torch.device, *, dtype: torch.dtype = BF16, heads: int = KV_HEADS) -> None:
    new = partial(torch.empty, device=device)
    pool, out = (new(size, heads, DIM, dtype=dtype) for size in (BATCH * CONTEXT, CONTEXT))
    gather_tokens(pool, pool, new(CONTEXT, dtype=I32), out, out)


def _step_flags(device: torch.device) -> None:
    new = partial(torch.empty, device=device)
    rows, up = new(BATCH, HIDDEN, dtype=BF16), new(BATCH, dtype=I32)
    numbers = {"step": new(1, dtype=I32), "lost": new(1, dtype=I32)}
    step_flags.send_rows(rows, rows, up, **numbers)
    for follows in (False, True):
        step_flags.raise_flags(up, follows=follows, stamp=None, **numbers)
    for stamp in (None, new(1, dtype=I32)):
        step_flags.raise_flags(up, follows=False, stamp=stamp, **numbers)
        step_flags.wait_flags(up, timeout_s=20.0, stamp=stamp, **numbers)


def _mirror(
    device: torch.device, *, scored: bool, k: int = K, resident: int = RESIDENT,
    context: int = CONTEXT, samples: int = SAMPLES,
) -> None:  # fmt: skip
    new = partial(torch.empty, device=device)
    selected = (BATCH, KV_HEADS, k)
    books = (BATCH + 1 if scored else BATCH, KV_HEADS, resident)
    options: dict[str, Any] = {}
    if scored:
        options = {
            "selected_scores": new(selected),
            "active": new(BATCH, dtype=torch.bool), "rows": new(BATCH, dtype=I64),
            "counters": new(3, dtype=I64),
            "log_weight": new(BATCH + 1, KV_HEADS, samples),
        }  # fmt: skip
    mirror_diff(
        new(selected, dtype=I32), new(books, dtype=I32), new(books, dtype=I32),
        step=new((), dtype=I32), num_protected=SINK, num_target=new(BATCH, dtype=I32),
        hi=new(BATCH, dtype=I32), fetch_cap=CAP, **options,
        scratch=make_mirror_scratch(BATCH, KV_HEADS, context, device, may_repeat=not scored),
    )  # fmt: skip


def _quantize(device: torch.device, *, page: int) -> None:
    new = partial(torch.empty, device=device)
    slots = BATCH * CONTEXT
    pool = new(slots, KV_HEADS, DIM, dtype=BF16)
    codes = new(slots, KV_HEADS, DIM, dtype=torch.int8)
    append_int8(pool, new(BATCH, dtype=I64), codes, new(slots, KV_HEADS))
    halves = new(slots // page, KV_HEADS, page, DIM // 2, dtype=torch.uint8)
    scales = new(slots // page, KV_HEADS, 2, DIM, dtype=FP16)
    quantize_int4_pages(pool, new(CONTEXT // page, dtype=I32), halves, scales)
    table = new(BATCH, CONTEXT // page, dtype=I32)
    append_int4(pool, table, new(BATCH, dtype=I32), halves, scales)
    channels = new(KV_HEADS, DIM // 2, dtype=I64)
    few8 = new(slots, KV_HEADS, DIM // 2, dtype=torch.int8)
    append_int8(pool, new(BATCH, dtype=I64), few8, new(slots, KV_HEADS), channels)
    few = (
        new(slots // page, KV_HEADS, page, DIM // 4, dtype=torch.uint8),
        new(slots // page, KV_HEADS, 2, DIM // 2, dtype=FP16),
    )
    quantize_int4_pages(pool, new(CONTEXT // page, dtype=I32), *few, channels)
    append_int4(pool, table, new(BATCH, dtype=I32), *few, channels)


def _query(
    device: torch.device, *, tokens: int = BATCH, dtype: torch.dtype = BF16, is_int8: bool = False,
    form: str = "",
) -> None:  # fmt: skip
    new = partial(torch.empty, device=device)
    width = QO_HEADS * DIM
    wide, plain = "wide" in form, "plain" in form
    turned = DIM // 2 if "partial" in form else DIM
    weights = QueryWeights(
        head_dim=DIM,
        weight=new(width, HIDDEN, dtype=torch.int8 if is_int8 else dtype),
        weight_scale=new(width) if is_int8 else None,
        bias=new(width, dtype=dtype) if "bias" in form else None,
        norm=None if "bare" in form else new(HIDDEN, dtype=dtype),
        query_norm=None if plain else new(width if wide else DIM, dtype=dtype),
        rotates_neighbours="neighbours" in form,
    )
    hidden = new(tokens, HIDDEN, dtype=dtype)
    predict_query(hidden, new(tokens, dtype=I64), weights, new(CONTEXT, turned))


def _window_of_queries(device: torch.device, *, prediction: str) -> None:
    new = partial(torch.empty, device=device)
    size = 17
    rows, places = new(BATCH, dtype=I64), new(BATCH + 1, dtype=I64)
    windows = new(BATCH + 1, size + 1, QO_HEADS, DIM, dtype=BF16)
    query = new(BATCH, QO_HEADS, DIM, dtype=BF16)
    angles = {"cos": new(size, DIM // 2), "sin": new(size, DIM // 2)}
    push_and_predict(query, rows, rows, windows, places, prediction=prediction, **angles)


def _samples(device: torch.device, *, samples: int, dtype: torch.dtype = BF16) -> None:
    new = partial(torch.empty, device=device)
    rows, slots = new(BATCH, dtype=I64), new(BATCH, samples, dtype=I32)
    table = new(BATCH + 1, CONTEXT, dtype=I32)
    load_sample_slots(rows, new(BATCH, dtype=I32), table, slots, num_sink=SINK, num_recent=RECENT)
    load_sample_moves(
        new(BATCH, dtype=I32), rows, rows, num_samples=samples, num_sink=SINK,
        num_resident=RESIDENT, num_recent=RECENT, num_dense=RESIDENT + RECENT,
    )  # fmt: skip
    query, pool = (BATCH, QO_HEADS, DIM), new(BATCH * CONTEXT, KV_HEADS, DIM, dtype=dtype)
    attend_samples(
        new(query, dtype=dtype), pool, pool, slots, rows, new(BATCH + 1, KV_HEADS, samples),
        new(BATCH, dtype=torch.bool), new(query, dtype=dtype), new(BATCH, QO_HEADS),
        scale=DIM**-0.5, lse_unit=1.0,
        scratch=make_sample_scratch(BATCH, QO_HEADS, samples, DIM, device),
    )  # fmt: skip


def _keys(
    device: torch.device, kind: str, *, dtype: torch.dtype, dim: int, page: int, context: int
) -> dict[str, Any]:
    """Return pool and scales of keys of ``native``, ``int8`` or ``int4``."""
    new = partial(torch.empty, device=device)
    slots = BATCH * context
    if kind == "native":
        return {"k_pool": new(slots, KV_HEADS, dim, dtype=dtype), "k_scale": None}
    if kind == "int8":
        codes = new(slots, KV_HEADS, dim, dtype=torch.int8)
        return {"k_pool": codes, "k_scale": new(slots, KV_HEADS)}
    codes = new(slots // page, KV_HEADS, page, dim // 2, dtype=torch.uint8)
    return {"k_pool": codes, "k_scale": new(slots // page, KV_HEADS, 2, dim, dtype=FP16)}


def _score(
    device: torch.device, operation: Callable[..., object], kind: str, *,
    dtype: torch.dtype = BF16, dim: int = DIM, page: int = 64, group: int = 4,
    context: int = CONTEXT, pooling: str = "softmax_mean", num_channels: int | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Call `score_keys` or `score_topk`."""
    new = partial(torch.empty, device=device)
    kept = num_channels or dim
    keys = _keys(device, kind, dtype=dtype, dim=kept, page=page, context=context)
    channels = new(KV_HEADS, kept, dtype=I64) if num_channels else None
    scan = KeyScan(
        q=new(BATCH, KV_HEADS * group, dim, dtype=dtype), **keys,
        slots=new(BATCH, context // page, dtype=I32), lo=new(BATCH, dtype=I32),
        hi=new(BATCH, dtype=I32), width=context, scale=dim**-0.5, page_size=page,
        pooling=pooling, active=new(BATCH, dtype=torch.bool), channels=channels,
    )  # fmt: skip
    operation(scan, **options)


def _window(
    device: torch.device, kind: str, *, dtype: torch.dtype = BF16, dim: int = DIM, page: int = 64
) -> None:
    new = partial(torch.empty, device=device)
    keys = _keys(device, kind, dtype=dtype, dim=dim, page=page, context=CONTEXT)
    score_window(
        new(64, QO_HEADS, dim, dtype=dtype), slots_row=new(CONTEXT // page, dtype=I32), lo=SINK,
        hi=CONTEXT - RECENT, q_positions=new(64, dtype=I64), scale=dim**-0.5, page_size=page,
        **keys,
    )  # fmt: skip


def _pages(
    device: torch.device, *, dtype: torch.dtype = BF16, dim: int = DIM, page: int = 16,
    pooling: str = "softmax_mean",
) -> None:  # fmt: skip
    new = partial(torch.empty, device=device)
    bounds = new(2, BATCH + 1, CONTEXT // page, KV_HEADS, dim, dtype=dtype)
    score_pages(
        new(BATCH, QO_HEADS, dim, dtype=dtype), bounds, *(new(BATCH, dtype=I64) for _ in range(3)),
        num_pages=CONTEXT // page, page_tokens=page, scale=dim**-0.5, pooling=pooling,
    )  # fmt: skip


def _topk(device: torch.device, *, k: int, context: int, bounded: bool) -> None:
    new = partial(torch.empty, device=device)
    options: dict[str, Any] = {"out_scores": new(BATCH, KV_HEADS, k)}
    if bounded:
        options |= {"lo": new(BATCH, dtype=I32), "hi": new(BATCH, dtype=I32)}
    from tandemkv.kernels.triton_ops.topk import topk_positions

    topk_positions(new(BATCH, KV_HEADS, context), k, sort=False, **options)


def _step_tables(device: torch.device) -> None:
    new = partial(torch.empty, device=device)
    rows, lengths = new(BATCH, dtype=I64), new(BATCH, dtype=I64)
    slots, attended = new(BATCH, RESIDENT + RECENT, dtype=I32), new(BATCH, dtype=I64)
    sizes = {"num_resident": RESIDENT, "num_recent": RECENT, "num_dense": RESIDENT + RECENT}
    table = new(BATCH + 1, CONTEXT, dtype=I32)
    load_attended(rows, lengths, table, slots, attended, first_slot=BATCH * CONTEXT, **sizes)
    load_ring(rows, lengths, slots, attended, rows, rows, **sizes)
    tables = CandidateTables(
        rows=rows, positions=rows, lengths=new(BATCH, dtype=I32), lo=new(BATCH, dtype=I32),
        hi=new(BATCH, dtype=I32), num_target=new(BATCH, dtype=I32),
        active=new(BATCH, dtype=torch.bool), pages=new(BATCH, CONTEXT // 64, dtype=I32),
        step=new((), dtype=I32), selections=new((), dtype=I64),
    )  # fmt: skip
    load_candidates(
        rows, lengths, table[:, ::64], tables, page_size=64, num_sink=SINK, num_excluded=RECENT,
        num_resident=RESIDENT, num_cold=new((), dtype=I32), num_layers=LAYERS,
    )  # fmt: skip


def _launches() -> dict[str, Launch]:
    keys, choice = partial(_score, operation=score_keys), partial(_score, operation=score_topk)
    far = {"k": 2048, "context": 1 << 18}
    return {
        "append": partial(_append, samples=False),
        "append, samples": partial(_append, samples=True),
        "append, samples and a step": partial(_append, samples=True, by_step=True),
        "attend": _attend,
        "attend, one request": partial(_attend, batch=1, page=64),
        "attend, heads of 64": partial(_attend, dtype=FP16, dim=64, group=1),
        "attend, heads of 256": partial(_attend, dim=256, group=2),
        "attend, float32": partial(_attend, dtype=FP32),
        "exchange": partial(_exchange, is_far=False),
        "exchange, another GPU": partial(_exchange, is_far=True),
        "changed rows": _changed_rows,
        "changed rows, heads of 256, float32": partial(_changed_rows, dim=256, dtype=FP32),
        "gather": _gather,
        "gather, one head, float32": partial(_gather, heads=1, dtype=FP32),
        "step flags": _step_flags,
        "mirror": partial(_mirror, scored=True),
        "mirror, large": partial(
            _mirror, scored=True, k=8192, resident=16388, context=1 << 18, samples=512
        ),
        "mirror, positions repeat": partial(_mirror, scored=False),
        "quantize": partial(_quantize, page=64),
        "quantize, pages of 128": partial(_quantize, page=128),
        "query": _query,
        "query, one token": partial(_query, tokens=1),
        "query, 64 tokens": partial(_query, tokens=64, form="bias plain"),
        "query, int8": partial(_query, is_int8=True),
        "query, float16 partial neighbours": partial(
            _query, dtype=FP16, form="partial neighbours"
        ),
        "query, norm of all heads": partial(_query, form="wide bare"),
        "query, float32": partial(_query, dtype=FP32),
        "window of queries": partial(_window_of_queries, prediction="ridge"),
        "window of queries, mean": partial(_window_of_queries, prediction="mean"),
        "samples": partial(_samples, samples=SAMPLES),
        "samples, 512": partial(_samples, samples=512),
        "samples, float32": partial(_samples, samples=SAMPLES, dtype=FP32),
        "scores, native": partial(keys, kind="native"),
        "scores, native, heads of 256": partial(keys, kind="native", dim=256, group=2),
        "scores, native, heads of 192": partial(keys, kind="native", dim=192, group=2),
        "scores, native, float32": partial(keys, kind="native", dtype=FP32),
        "scores, int8": partial(keys, kind="int8", pooling="max_logit"),
        "scores, int4": partial(keys, kind="int4", pooling="mean_logit"),
        "scores, slots": partial(keys, kind="native", page=1),
        "pages": _pages,
        "pages of one token, max_logit": partial(_pages, page=1, pooling="max_logit"),
        "pages, heads of 256, float32": partial(_pages, dim=256, dtype=FP32),
        "choice, native": partial(choice, kind="native", k=K),
        "choice, int8": partial(choice, kind="int8", k=K),
        "choice, int4": partial(choice, kind="int4", k=K, page=128),
        "choice, int4, group of 16": partial(choice, kind="int4", k=K, group=16),
        "choice, int4, group of 1": partial(choice, kind="int4", k=K, group=1),
        "choice, int4, heads of 96": partial(choice, kind="int4", k=K, dim=96, group=3),
        "choice, int4, heads of 64": partial(choice, kind="int4", k=K, dim=64, dtype=FP16),
        "choice, int4, 64 channels": partial(choice, kind="int4", k=K, page=128, num_channels=64),
        "choice, int4, 32 of 64": partial(choice, kind="int4", k=K, dim=64, num_channels=32),
        "choice, int4, 256K": partial(choice, kind="int4", page=128, **far),
        "choice, long lists": partial(choice, kind="int4", k=8192),
        "choice, neighbours pooled": partial(
            choice, kind="int8", k=K, pooled_positions=(2, 2)
        ),
        "choice, max_logit": partial(choice, kind="native", k=K, pooling="max_logit"),
        "seeding, native": partial(_window, kind="native"),
        "seeding, int8": partial(_window, kind="int8"),
        "seeding, int4": partial(_window, kind="int4", page=128),
        "seeding, heads of 256": partial(_window, kind="native", dim=256),
        "seeding, float32": partial(_window, kind="native", dtype=FP32),
        "top-k": partial(_topk, k=K, context=CONTEXT, bounded=True),
        "top-k, long lists": partial(_topk, k=8192, context=1 << 18, bounded=False),
        "step tables": _step_tables,
    }  # fmt: skip


LAUNCHES = _launches()
OF_EACH_KERNEL = (
    "append, samples and a step", "attend", "exchange, another GPU", "changed rows", "gather",
    "step flags", "mirror", "quantize", "query, int8", "window of queries",
    "window of queries, mean", "samples",
    "scores, native", "pages", "choice, int4", "choice, neighbours pooled", "seeding, int4",
    "step tables",
)  # fmt: skip
"""Enough to launch each kernel once."""
TIGHT = (
    "attend, heads of 256", "attend, float32", "query, 64 tokens", "scores, native, float32",
    "scores, native, heads of 192", "scores, native, heads of 256", "seeding, heads of 256",
)  # fmt: skip
"""Those with the largest tiles."""
