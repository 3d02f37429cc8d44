# SPDX-License-Identifier: Apache-2.0
"""The best positions, and which of them are fetched, against plain Python: nothing may differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from in_python import Limits, best_positions, grown, mirrored, padded, pooled
from numerics_draw import FLOAT32, INTS, Compared, Draw
from tolerances import EXACT

from tandemkv.kernels.mirror import make_mirror_scratch, mirror_diff
from tandemkv.kernels.position_pooling import MAX_REACH, pool_positions
from tandemkv.kernels.topk import topk_positions


def _contents(draw: Draw, *shape: int) -> torch.Tensor:
    """Scores: all different, with many ties, or with infinities and NaN among them."""
    found = torch.randn(shape)
    kind = draw.option("contents", ("different", "ties", "special"))
    if kind == "ties":
        return found.round()
    if kind == "special":
        special = torch.tensor([-math.inf, math.inf, math.nan, 3e38, -0.0, 0.0])
        chosen = special[torch.randint(0, len(special), shape)]
        return torch.where(torch.rand(shape) < 0.3, chosen, found)
    return found


def topk(draw: Draw) -> Iterator[Compared]:
    """`topk_positions`."""
    shape = draw.number("num_reqs", 1, 4, 2), draw.number("heads", 1, 4, 2)
    width = draw.number("width", 1, 3000, 500)
    k, scores = draw.number("k", 0, width + 10), _contents(draw, *shape, width)
    want = best_positions(scores, (None, None), k)
    yield Compared("positions", topk_positions(scores, k), want, EXACT)


def pooling(draw: Draw) -> Iterator[Compared]:
    """`pool_positions`."""
    shape = draw.number("num_reqs", 1, 3), draw.number("heads", 1, 3)
    scores = _contents(draw, *shape, draw.number("width", 1, 800, 300))
    reach = draw.number("before", 0, MAX_REACH), draw.number("after", 1, MAX_REACH)
    want = [pooled(row, *reach) for row in scores.double().flatten(0, 1).tolist()]
    got = pool_positions(scores, *reach)
    yield Compared("pooled", got, torch.tensor(want).view(scores.shape), EXACT)


def _weights_of(
    resident: list[int], hi: int, num_sink: int, states: list[list[int]]
) -> list[float]:
    """Return the log weights of samples: what is not resident, shared out by their spans.

    `states` is `grown` until a sample comes behind the last: that says what the last stands for.
    """
    count = max(0, hi - num_sink)
    places = states[count - 1] if count else [-1] * len(states[0])
    later = sorted({p for p in places if p >= 0} | {max(state) for state in states[count:]})
    spans = [later[later.index(p) + 1] - p if p >= 0 else 0 for p in places]
    is_free = [p >= 0 and p + num_sink not in resident for p in places]
    total = sum(span for span, free in zip(spans, is_free, strict=True) if free)
    left_out = hi - sum(p >= 0 for p in resident)
    shares = [
        left_out * span / total if free else 0.0 for span, free in zip(spans, is_free, strict=True)
    ]
    return [math.log(share) if share > 0 else -math.inf for share in shares]


@dataclass
class _Books:
    """What `mirror_diff` keeps, done by plain Python beside it."""

    pos: torch.Tensor  # [B, H, R]
    used: torch.Tensor
    hi: torch.Tensor
    target: torch.Tensor
    counted: list[int]

    def update(
        self, at: tuple[int, int], chosen: list[int], limits: Limits, *, is_sorted: bool
    ) -> list[tuple[int, int]]:
        """Do one head of one request; return what is fetched."""
        pos, used = self.pos[at].tolist(), self.used[at].tolist()
        self.counted[0] += sum(p in pos for p in chosen)
        self.counted[1] += len(set(chosen) - set(pos))
        target, end = int(self.target[at[0]]), int(self.hi[at[0]])
        fetched = mirrored(chosen, pos, used, target, end, limits, is_sorted=is_sorted)
        self.counted[2] += len(fetched)
        self.pos[at], self.used[at] = torch.tensor([pos, used])
        return fetched


def _books(draw: Draw, num_reqs: int, heads: int, num_resident: int, context: int) -> _Books:
    """Draw books with holes, of which all positions are below each request's end."""
    pos = torch.rand(num_reqs, heads, context).argsort(-1)[..., :num_resident].int()
    pos[torch.rand(pos.shape) < draw.option("holes", (0.0, 0.3, 0.9))] = -1
    hi = torch.maximum(pos.flatten(1).amax(1) + 1, draw.integers(1, context, num_reqs))
    used = draw.integers(-1, 2, num_reqs, heads, num_resident)
    target = draw.integers(0, num_resident, num_reqs)
    return _Books(pos, used.to(draw.dtype("used", INTS)), hi.int(), target, [0, 0, 0])


def _selection(
    draw: Draw, hi: torch.Tensor, heads: int, k: int, *, is_scored: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw positions of each head below `hi`, padded; distinct ones with scores, or repeated."""
    rows: list[list[int]] = []
    for end in hi.tolist():
        for _ in range(heads):
            size = draw.random.randint(0, min(k, end) if is_scored else k)
            one = draw.random.sample(range(end), size) if is_scored else None
            rows.append(padded(one or [draw.random.randrange(-1, end) for _ in range(size)], k))
    selected = torch.tensor(rows, dtype=torch.int32).view(len(hi), heads, k)
    if not is_scored:
        return selected, None
    scores = torch.randint(-3, 4, selected.shape).float()
    scores[torch.rand(scores.shape) < 0.1] = math.nan
    return selected, torch.where(scores == -3, -math.inf, scores)


def mirror(draw: Draw) -> Iterator[Compared]:
    """`mirror_diff` over three steps."""
    num_reqs, heads = draw.number("num_reqs", 1, 3, 2), draw.number("heads", 1, 3, 2)
    num_resident, k = draw.number("num_resident", 1, 90, 20), draw.number("k", 0, 60, 16)
    context, cap = num_resident + draw.number("more", 1, 300, 40), draw.number("cap", 0, 40, 12)
    is_scored, has_idle = draw.flag("scored"), draw.flag("idle")
    num_sink = draw.number("sink", 0, 5)
    num_samples = 2 * draw.number("half_samples", 1, 16, 4)
    want = _books(draw, num_reqs, heads, num_resident, context)
    rows, got = None, (want.pos.clone(), want.used.clone())
    if draw.flag("rows"):
        rows = torch.randperm(num_reqs + 2)[:num_reqs]
        got = tuple(part.new_full((num_reqs + 2, *part.shape[1:]), 5) for part in got)
        got[0][rows], got[1][rows] = want.pos, want.used
    weight, counters = torch.full((len(got[0]), heads, num_samples), 7.0), torch.zeros(3).long()
    scratch = make_mirror_scratch(num_reqs, heads, context, "cpu")
    states = grown(num_samples, 2 * (context + num_samples))
    places = list(range(num_reqs)) if rows is None else rows.tolist()
    for step in (3, 4, 5):
        selected, scores = _selection(draw, want.hi, heads, k, is_scored=is_scored)
        active = torch.rand(num_reqs) < 0.7 if has_idle else None
        fetch = mirror_diff(
            selected, *got, step=torch.tensor(step), num_protected=num_sink,
            num_target=want.target, hi=want.hi, fetch_cap=cap, selected_scores=scores,
            active=active, rows=rows, counters=counters, log_weight=weight, scratch=scratch,
        )  # fmt: skip
        limits = Limits(step, num_sink, cap)
        for at in product(range(num_reqs), range(heads)):
            fetched: list[tuple[int, int]] = []
            if active is None or active[at[0]]:
                chosen = _in_order(selected[at].tolist(), None if scores is None else scores[at])
                fetched = want.update(at, chosen, limits, is_sorted=is_scored)
                shared = _weights_of(want.pos[at].tolist(), int(want.hi[at[0]]), num_sink, states)
                of_head = weight[places[at[0]], at[1]]
                yield Compared("weights", of_head, torch.tensor(shared), FLOAT32)
            for what, part, side in (("positions", fetch[0], 0), ("slots", fetch[1], 1)):
                of_side = torch.tensor(padded([pair[side] for pair in fetched], cap))
                yield Compared(what, part[at], of_side, EXACT)
        yield Compared("resident", got[0][places], want.pos, EXACT)
        yield Compared("last used", got[1][places], want.used, EXACT)
    yield Compared("counters", counters, torch.tensor(want.counted), EXACT)


def _in_order(selected: list[int], scores: torch.Tensor | None) -> list[int]:
    """Return selected positions best first, without padding."""
    if scores is None:
        return [p for p in selected if p >= 0]
    ranked = [
        (math.inf if math.isnan(score) else -score, p)
        for score, p in zip(scores.tolist(), selected, strict=True)
    ]
    return [p for _, p in sorted(ranked) if p >= 0]
