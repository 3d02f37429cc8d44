# SPDX-License-Identifier: Apache-2.0
"""Steps of `lfps` in Numba against its printed equations in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from lfps_bench import Bench
from lfps_reference import Reference
from numerics_draw import FLOAT32, Compared, Draw
from tolerances import Tolerance

ATTENDED = Tolerance(abs_error=2e-5, rel_error=2e-4, cosine_gap=1e-8)
TABLES = Tolerance(abs_error=1e-5, rel_error=1e-4, cosine_gap=1e-8)
NEAR = 2e-5
"""A decision this near is that of float32: what follows from it is not compared."""


def steps(draw: Draw) -> Iterator[Compared]:
    """`lfps_heads`: tables of a prompt, then steps that read and update them."""
    sink, recent = draw.number("sink", 1, 6), draw.number("recent", 6, 40)
    budget, rows = sink + recent + draw.number("budget", 0, 60), draw.number("rows", 1, 8)
    first = sink + recent + budget + rows + draw.number("more", 1, 400)
    num_steps, group = draw.number("steps", 1, 12), draw.number("group", 1, 4)
    bench = Bench(
        heads=draw.number("heads", 1, 3), group=group, dim=2 * draw.number("half_dim", 2, 48),
        positions=first + num_steps, seed=draw.random.getrandbits(40), budget_tokens=budget,
        num_sink_tokens=sink, num_recent_tokens=recent,
        dtype=draw.option("dtype", ("float32", "bfloat16")),
        options={
            "rows": rows,
            "threshold": draw.option("threshold", (0.05, 0.2, 0.4)),
            "decay": draw.option("decay", (0.8, 0.95)),
            "sparsity": draw.option("sparsity", (0.02, 0.85)),
        },
    )  # fmt: skip
    stored = getattr(torch, bench.model.dtype)
    bench.k, bench.v = bench.k.to(stored).float(), bench.v.to(stored).float()
    references, pools = bench.references(), bench.stored()
    bench.start(first)
    of_prompt = list(range(first - rows, first))
    for head, each in enumerate(references):
        each.start(np.stack([bench.group(head, p) for p in of_prompt]), of_prompt)
    yield from _tables(bench, references, first)
    for position in range(first, first + num_steps):
        found = bench.step(position, pools).merged[0]
        for head, each in enumerate(references):
            output, lse, *_ = each.step(bench.group(head, position), position)
            if each.margin < NEAR:
                return
            got = found[head * group : (head + 1) * group]
            yield Compared("output", got[:, :-1], torch.from_numpy(output), ATTENDED)
            yield Compared("lse", got[:, -1], torch.from_numpy(lse), FLOAT32)
        yield from _tables(bench, references, position + 1)


def _tables(bench: Bench, references: list[Reference], end: int) -> Iterator[Compared]:
    """Compare both tables of all heads, for the candidates before position `end`."""
    sink = bench.selection.num_sink_tokens
    n = end - bench.selection.num_recent_tokens - sink
    vertical, slash = (torch.from_numpy(bench.table(x, n)) for x in ("vertical", "slash"))
    for name, table in (("vertical", vertical), ("slash", slash.flip(1))):
        want = np.stack([getattr(each, name)[sink:] for each in references])
        yield Compared(name, table, torch.from_numpy(want), TABLES)
