# SPDX-License-Identifier: Apache-2.0
"""`mirror_diff` against a slow oracle, and its invariants over many steps."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_python import Limits, mirrored, padded

from tandemkv.kernels.mirror import make_mirror_scratch, mirror_diff


@st.composite
def any_call(draw: st.DrawFn) -> dict[str, Any]:
    """Draw one call from any mirror state, holes and uneven heads included."""
    num_reqs, num_heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    k, num_resident = draw(st.integers(0, 7)), draw(st.integers(0, 7))
    step = draw(st.integers(1, 5))
    position = st.integers(-1, 14)

    def heads(row: st.SearchStrategy[list[int]]) -> list[list[list[int]]]:
        head = st.lists(row, min_size=num_heads, max_size=num_heads)
        return draw(st.lists(head, min_size=num_reqs, max_size=num_reqs))

    distinct = st.lists(st.integers(0, 14), max_size=num_resident, unique=True)
    resident = distinct.flatmap(lambda p: st.permutations(padded(p, num_resident)))
    per_req = st.lists(st.integers(0, 14), min_size=num_reqs, max_size=num_reqs)
    return {
        "selected": heads(st.lists(position, min_size=k, max_size=k)),
        "resident_pos": heads(resident),
        "last_used": heads(
            st.lists(st.integers(-1, step), min_size=num_resident, max_size=num_resident)
        ),
        "num_target": draw(per_req),
        "hi": draw(per_req),
        "limits": Limits(step, draw(st.integers(0, 8)), draw(st.integers(0, 8))),
    }


def rows(values: list[list[list[int]]], width: int) -> torch.Tensor:
    """Return ``[B, H, width]`` int32; what is larger wraps around."""
    return torch.tensor(values, dtype=torch.int64).reshape(len(values), len(values[0]), width).int()


@settings(max_examples=300, deadline=None)
@given(any_call(), st.sampled_from((0, 2**31 - 4, 2**31 - 1, 2**31, 2**32 - 3)))
def test_equals_the_oracle(call: dict[str, Any], before: int) -> None:
    """Also where steps of 32 bits wrap around, after so many `before` the first."""
    limits: Limits = replace(call["limits"], step=before + call["limits"].step)
    call["last_used"] = [[[before + x for x in head] for head in req] for req in call["last_used"]]
    selected = rows(call["selected"], len(call["selected"][0][0]))
    num_resident = len(call["resident_pos"][0][0])
    pos, used = rows(call["resident_pos"], num_resident), rows(call["last_used"], num_resident)
    fetch_pos, fetch_slot = mirror_diff(
        selected, pos, used, step=torch.tensor(limits.step).int(),
        num_protected=limits.num_protected, num_target=torch.tensor(call["num_target"]),
        hi=torch.tensor(call["hi"]), fetch_cap=limits.fetch_cap,
    )  # fmt: skip
    assert fetch_pos.dtype == fetch_slot.dtype == torch.int32
    for req in range(len(call["hi"])):
        for head in range(len(call["selected"][req])):
            want_pos = call["resident_pos"][req][head]
            want_used = call["last_used"][req][head]
            fetched = mirrored(
                call["selected"][req][head], want_pos, want_used, call["num_target"][req],
                call["hi"][req], limits,
            )  # fmt: skip
            assert fetch_pos[req, head].tolist() == padded(
                [p for p, _ in fetched], limits.fetch_cap
            )
            assert fetch_slot[req, head].tolist() == padded(
                [s for _, s in fetched], limits.fetch_cap
            )
            assert pos[req, head].tolist() == want_pos
            assert torch.equal(used[req, head], torch.tensor(want_used, dtype=torch.int64).int())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_invariants_over_a_growing_request(data: st.DataObject) -> None:
    num_heads, num_resident = 3, data.draw(st.integers(1, 10))
    sink = data.draw(st.integers(0, num_resident))
    cap = data.draw(st.integers(1, 5))
    length = data.draw(st.integers(sink, sink + 12))
    pos = torch.full((1, num_heads, num_resident), -1, dtype=torch.int32)
    pos[..., :sink] = torch.arange(sink)
    used = torch.full_like(pos, -1, dtype=torch.int64)
    for step in range(1, 9):
        length += data.draw(st.integers(0, 3))
        candidates = list(range(sink, length))
        chosen = st.lists(st.sampled_from(candidates), max_size=6, unique=True)
        selected = torch.tensor(
            [[padded(data.draw(chosen) if candidates else [], 6) for _ in range(num_heads)]],
            dtype=torch.int32,
        )
        before = pos.clone()
        target = min(num_resident, length)
        fetch_pos, fetch_slot = mirror_diff(
            selected, pos, used, step=torch.tensor(step), num_protected=sink,
            num_target=torch.tensor([target]), hi=torch.tensor([length]), fetch_cap=cap,
        )  # fmt: skip
        filled = (pos >= 0).sum(-1)
        expected = min(target, int((before[0, 0] >= 0).sum()) + cap)
        assert set(filled.flatten().tolist()) == {expected}  # even heads, and growth up to the cap
        for head in range(num_heads):
            now, old = pos[0, head].tolist(), before[0, head].tolist()
            wanted = set(selected[0, head].tolist()) - {-1}
            assert all(p >= 0 for p in now[:expected])  # no holes
            assert len(set(now[:expected])) == expected  # no duplicates
            assert all(p < length for p in now)
            assert now[:sink] == list(range(sink))
            assert wanted & set(old) <= set(now)  # touched ones are not evicted
            changes = {(p, s) for s, (p, o) in enumerate(zip(now, old, strict=True)) if p != o}
            reported = zip(fetch_pos[0, head].tolist(), fetch_slot[0, head].tolist(), strict=True)
            assert changes == {pair for pair in reported if pair != (-1, -1)}
            assert len(changes) <= cap


def test_worked_example() -> None:
    selected = torch.tensor([[[9, 4, 7, 9, -1]]], dtype=torch.int32)
    pos = torch.tensor([[[0, 4, 5, 6, -1, -1]]], dtype=torch.int32)
    used = torch.tensor([[[1, 1, 3, 2, -1, -1]]], dtype=torch.int32)
    fetch_pos, fetch_slot = mirror_diff(
        selected, pos, used, step=torch.tensor(4), num_protected=1, num_target=torch.tensor([5]),
        hi=torch.tensor([12]), fetch_cap=4,
    )  # fmt: skip
    # 4 is touched; 9 takes the one empty slot within the target, 7 evicts 6 (used in step 2).
    assert fetch_pos.tolist() == [[[9, 7, -1, -1]]]
    assert fetch_slot.tolist() == [[[4, 3, -1, -1]]]
    assert pos.tolist() == [[[0, 4, 5, 7, 9, -1]]]
    assert used.tolist() == [[[1, 4, 3, 4, 4, -1]]]


@settings(max_examples=200, deadline=None)
@given(any_call(), st.data())
def test_scores_decide_and_idle_rows_stay(call: dict[str, Any], data: st.DataObject) -> None:
    limits: Limits = call["limits"]
    heads = [[list(dict.fromkeys(head)) for head in req] for req in call["selected"]]
    width = max((len(head) for req in heads for head in req), default=0)
    heads = [[padded(head, width) for head in req] for req in heads]
    score = st.sampled_from([-math.inf, -1.0, 0.0, 1.0, math.nan])
    scores = [
        [data.draw(st.lists(score, min_size=width, max_size=width)) for _ in req] for req in heads
    ]
    active = [data.draw(st.booleans()) for _ in heads]
    num_resident = len(call["resident_pos"][0][0])
    pos, used = rows(call["resident_pos"], num_resident), rows(call["last_used"], num_resident)
    fetch = mirror_diff(
        rows(heads, width), pos, used, step=torch.tensor(limits.step),
        num_protected=limits.num_protected, num_target=torch.tensor(call["num_target"]),
        hi=torch.tensor(call["hi"]), fetch_cap=limits.fetch_cap, active=torch.tensor(active),
        selected_scores=torch.tensor(scores).reshape(len(heads), len(heads[0]), width),
    )  # fmt: skip
    for req, head_rows in enumerate(heads):
        for head, selected in enumerate(head_rows):
            want_pos = call["resident_pos"][req][head]
            want_used = call["last_used"][req][head]
            ranked = [
                (math.inf if math.isnan(s) else -s, p)
                for s, p in zip(scores[req][head], selected, strict=True)
            ]
            fetched = []
            if active[req]:
                fetched = mirrored(
                    [p for _, p in sorted(ranked)], want_pos, want_used,
                    call["num_target"][req], call["hi"][req], limits, is_sorted=True,
                )  # fmt: skip
            for part, side in zip(fetch, (0, 1), strict=True):
                want = padded([pair[side] for pair in fetched], limits.fetch_cap)
                assert part[req, head].tolist() == want
            assert pos[req, head].tolist() == want_pos
            assert used[req, head].tolist() == want_used


def test_bad_arguments() -> None:
    state = torch.zeros(2, 1, 4, dtype=torch.int32)
    arguments: dict[str, Any] = {
        "step": torch.tensor(1), "num_protected": 0,
        "num_target": torch.zeros(2, dtype=torch.int64),
        "hi": torch.zeros(2, dtype=torch.int64), "fetch_cap": 1,
    }  # fmt: skip
    for name, value in (
        ("fetch_cap", -1), ("num_protected", -2), ("hi", torch.zeros(3).long()),
        ("num_target", torch.zeros(2)), ("step", torch.zeros(3).long()),
        ("step", torch.zeros(2, 1).long()), ("active", torch.zeros(3, dtype=torch.bool)),
        ("selected_scores", torch.zeros(2, 1, 3)), ("scratch", make_mirror_scratch(1, 1, 9, "cpu")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            mirror_diff(state[..., :2], state, state.clone(), **{**arguments, name: value})
    scratch = make_mirror_scratch(2, 1, 9, "cpu", may_repeat=False)
    with pytest.raises(ValueError, match="may_repeat=True"):
        mirror_diff(state[..., :2], state, state.clone(), **arguments, scratch=scratch)
    with pytest.raises(ValueError, match=r"last_used\.shape"):
        mirror_diff(state, state, state[:1], **arguments)
