# SPDX-License-Identifier: Apache-2.0
"""Predicted queries, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import in_float64
import torch
from numerics_draw import FLOAT32, FLOATS, MULTIPLIED, Compared, Draw
from query_inputs import FORMS, predict_in_float64, query_inputs, tolerance_of, with_int8
from tolerances import Tolerance

from tandemkv.kernels.query import predict_query
from tandemkv.kernels.query_window import mean_predict, push_and_predict, ridge_predict

# The weights come out of linear systems: their condition multiplies the rounding of float32.
SOLVED = Tolerance(abs_error=3e-4, rel_error=3e-4, cosine_gap=1e-7)


def query(draw: Draw) -> Iterator[Compared]:
    """`predict_query`."""
    heads, dim = draw.number("heads", 1, 12, 4), 8 * draw.number("dim", 1, 16, 6)
    sizes = draw.number("tokens", 1, 12, 5), draw.number("hidden", 8, 900, 200), heads, dim
    dtype = draw.dtype("dtype", FLOATS)
    given = query_inputs(
        sizes, dtype, "cpu", has_bias=draw.flag("bias"), has_norm=draw.flag("norm"),
        form=draw.option("form", ("", *FORMS)),
    )  # fmt: skip
    given = with_int8(given) if draw.flag("int8") else given
    yield Compared("query", predict_query(*given), predict_in_float64(*given), tolerance_of(dtype))


def _settings(draw: Draw) -> dict[str, object]:
    return {
        "eps": draw.option("eps", (0.01, 0.03, 0.2)),
        "sign": draw.option("sign", (1, -1)),
        "normalise": draw.option("normalise", ("softmax", "none")),
    }


def ridge(draw: Draw) -> Iterator[Compared]:
    """`ridge_predict` and `mean_predict` of windows, some of which are not full."""
    num, size = draw.number("num", 1, 6, 3), draw.number("size", 1, 16)
    window = torch.randn(num, size + 1, draw.number("dim", 1, 128, 64))
    window = torch.cat([window[:, :1], 0.7 * window[:, :-1] + 0.7 * window[:, 1:]], 1)
    counts = draw.integers(1, size + 1, num)
    settings, there = _settings(draw), [slice(size + 1 - n, None) for n in counts.tolist()]
    spoiled = torch.full_like(window, math.nan)
    for row, part in enumerate(there):
        spoiled[row, part] = window[row, part]
    kept = [window[row, part].double() for row, part in enumerate(there)]
    want = torch.stack([in_float64.ridge(queries, **settings) for queries in kept])
    yield Compared("ridge", ridge_predict(spoiled, counts, **settings), want, SOLVED)
    want = torch.stack([queries.mean(0) for queries in kept])
    yield Compared("mean", mean_predict(spoiled, counts), want, FLOAT32)


def query_windows(draw: Draw) -> Iterator[Compared]:
    """`push_and_predict` over some steps, by queries that are turned to the place of their use."""
    num_reqs, heads, half = draw.number("num_reqs", 1, 3), draw.number("heads", 1, 4), 4
    half *= draw.number("dim", 1, 16, 6)
    prediction = draw.option("prediction", ("ridge", "mean"))
    size = draw.number("size", 1, 16 if prediction == "ridge" else 30) + 1
    dtype = draw.dtype("dtype", MULTIPLIED if draw.is_interpreted else FLOATS)
    settings, turns = _settings(draw), draw.flag("turns")
    windows = torch.randn(num_reqs + 2, size + 1, heads, 2 * half).to(dtype)
    rows = torch.randperm(num_reqs + 2)[:num_reqs]
    first = torch.randint(0, 200, (num_reqs,))
    starts = torch.full((num_reqs + 2,), 1 << 62)
    starts[rows] = first
    angles = torch.rand(size, half) * 6
    tables = {"cos": angles.cos(), "sin": angles.sin()} if turns else {}
    kept: list[list[torch.Tensor]] = [[] for _ in range(num_reqs)]
    for step in range(draw.number("steps", 1, 2 * size, 3)):
        pushed = torch.randn(num_reqs, heads, 2 * half).to(dtype)
        got = push_and_predict(
            pushed, rows, first + step, windows, starts, prediction=prediction, **tables, **settings
        )
        want = torch.empty(got.shape, dtype=torch.float64)
        for req, queries in enumerate(kept):
            queries.append(pushed[req].double())
            window = torch.stack(queries[-size:])
            if turns:
                cos, sin = (t.double().flip(0)[-len(window) :, None] for t in tables.values())
                a, b = window.chunk(2, -1)
                window = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            for head in range(heads):
                seen = window[:, head]
                is_mean = prediction == "mean"
                want[req, head] = seen.mean(0) if is_mean else in_float64.ridge(seen, **settings)
        yield Compared("prediction", got, want, SOLVED)
