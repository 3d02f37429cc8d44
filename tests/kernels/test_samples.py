# SPDX-License-Identifier: Apache-2.0
"""Samples: where they are, what they stand for, and attention over them."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_float64 import attended, with_samples
from in_python import grown
from tolerances import Tolerance, assert_close

from tandemkv.kernels.append import SampleMoves, append_tokens
from tandemkv.kernels.mirror import mirror_diff
from tandemkv.kernels.samples import (
    attend_samples,
    load_sample_moves,
    load_sample_slots,
    sample_offsets,
)

FLOAT32 = Tolerance(abs_error=1e-5, rel_error=1e-5, cosine_gap=1e-9)


@pytest.mark.parametrize("num_samples", [2, 6, 8, 10])
def test_samples_move_one_by_one_and_stay_even(num_samples: int) -> None:
    states = grown(num_samples, 300)
    offsets, spans = sample_offsets(torch.arange(301), num_samples)
    assert offsets[0].tolist() == [-1] * num_samples
    assert offsets[1:].tolist() == states
    for count, (found, span) in enumerate(zip(states, spans[1:].tolist(), strict=True), 1):
        ordered = sorted((x, gap) for x, gap in zip(found, span, strict=True) if x >= 0)
        gaps = [after - x for (x, _), (after, _) in itertools.pairwise(ordered)]
        assert gaps == [gap for _, gap in ordered[:-1]]
        assert len(ordered) == min(count, num_samples)
        assert max(gaps, default=1) <= 2 * min(gaps, default=1)
        # Nothing at the end is far from a sample.
        assert count - ordered[-1][0] <= max(gaps, default=1)
        before = states[count - 2] if count > 1 else [-1] * num_samples
        changed = [i for i in range(num_samples) if found[i] != before[i]]
        assert len(changed) <= 1


def test_a_worked_example() -> None:
    # Eight of 17: every second of the first 16, and 16 in the place of 2. Which of two candidates
    # that are 4 apart is the nearest sample changes with it, so 0 stands for 4 from now on.
    offsets, spans = sample_offsets(torch.tensor(17), 8)
    assert offsets.tolist() == [0, 8, 16, 10, 4, 12, 6, 14]
    assert spans.tolist() == [4, 2, 4, 2, 2, 2, 2, 2]


def test_weights_share_out_what_is_not_resident() -> None:
    # Candidates 2 to 19: 18, of which samples are at 2 + (0, 8, 16, 10, 4, 12, 6, 14), see above.
    resident = torch.tensor([[[0, 1, 10, 5, 3], [0, 1, 19, 18, 17]]], dtype=torch.int32)
    weight = torch.zeros(1, 2, 8)
    mirror_diff(
        torch.full((1, 2, 1), -1, dtype=torch.int32), resident, torch.zeros_like(resident),
        step=torch.tensor(1), num_protected=2, num_target=torch.tensor([5]), hi=torch.tensor([19]),
        fetch_cap=0, log_weight=weight,
    )  # fmt: skip
    left_out = 19 - 5
    spans = torch.tensor([4.0, 2, 4, 2, 2, 2, 2, 2])
    first = spans.clone()
    first[1] = 0.0  # position 10 is resident
    second = spans.clone()
    second[2] = 0.0  # 18 is
    want = torch.stack([first / first.sum(), second / second.sum()]) * left_out
    assert_close(weight[0].exp(), want.double(), FLOAT32)
    assert weight[0, 0, 1] == weight[0, 1, 2] == -math.inf


def test_nothing_is_left_out_where_all_is_resident() -> None:
    resident = torch.arange(12, dtype=torch.int32).view(1, 1, 12)
    weight = torch.zeros(1, 1, 4)
    mirror_diff(
        torch.full((1, 1, 1), -1, dtype=torch.int32), resident, torch.zeros_like(resident),
        step=torch.tensor(1), num_protected=2, num_target=torch.tensor([12]), hi=torch.tensor([12]),
        fetch_cap=1, log_weight=weight,
    )  # fmt: skip
    assert weight.tolist() == [[[-math.inf] * 4]]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 4]))
def test_attention_equals_one_softmax_over_all(seed: int, group: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    heads, dim, num_slots, num_samples, scale = 2, 8, 20, 6, 0.4
    q, k, v = draw(3, heads * group, dim), draw(num_slots, heads, dim), draw(num_slots, heads, dim)
    others_k, others_v = draw(3, 5, heads, dim), draw(3, 5, heads, dim)
    weight = 2 * draw(4, heads, num_samples)
    weight[draw(4, heads, num_samples) > 0.5] = -math.inf
    weight[2, 1] = -math.inf
    slots = torch.randint(0, num_slots, (3, num_samples), generator=generator)
    rows, active = torch.tensor([2, 0, 3]), torch.tensor([True, False, True])
    alone, lse = map(
        torch.stack, zip(*map(attended, q, others_k, others_v, [scale] * 3), strict=True)
    )
    want = with_samples(q, (others_k, others_v), (k[slots], v[slots]), weight[rows], scale)
    want = torch.where(active[:, None, None], want, alone)
    out, unit = alone.float(), math.log(2.0)
    attend_samples(
        q, k, v, slots, rows, weight, active, out, (lse / unit).float(), scale=scale, lse_unit=unit
    )
    assert_close(out, want, Tolerance(abs_error=2e-5, rel_error=2e-5, cosine_gap=1e-9))


def test_slots_without_weight_may_hold_anything() -> None:
    k = torch.full((2, 1, 4), math.nan)
    out, q = torch.ones(1, 1, 4), torch.ones(1, 1, 4)
    attend_samples(
        q, k, k, torch.tensor([[0, 1]]), torch.tensor([0]), torch.full((1, 1, 2), -math.inf),
        torch.tensor([True]), out, torch.zeros(1, 1), scale=1.0,
    )  # fmt: skip
    assert torch.equal(out, torch.ones(1, 1, 4))


def test_samples_follow_a_request_through_its_ring() -> None:
    """Tokens become samples as they leave the ring, first of all those of a dense request."""
    num_resident, num_recent, num_samples, num_sink = 9, 4, 4, 2
    num_dense = num_resident + num_recent
    ring = torch.full((1, num_resident + num_recent, 1, 1), -1.0)
    samples = torch.full((1, num_samples, 1, 1), -1.0)
    rows, length = torch.tensor([0]), torch.zeros(1, dtype=torch.int64)
    moves, sources = torch.zeros(2, 1, dtype=torch.int64)
    for position in range(120):
        length += 1
        load_sample_moves(
            length, moves, sources, num_samples=num_samples, num_sink=num_sink,
            num_resident=num_resident, num_recent=num_recent, num_dense=num_dense,
        )  # fmt: skip
        first = position + 1 <= num_dense and position < num_resident
        slot = position if first else num_resident + (position - num_resident) % num_recent
        token = torch.full((1, 1, 1), float(position))
        append_tokens(
            token, token, rows, torch.tensor([slot]), ring, ring.clone(),
            moves=SampleMoves(k=samples, v=samples.clone(), samples=moves, sources=sources),
        )  # fmt: skip
        offsets, _ = sample_offsets((length - num_recent - num_sink).clamp(min=0), num_samples)
        want = torch.where(offsets >= 0, offsets + num_sink, -1)[0]
        assert samples[0, :, 0, 0].tolist() == want.tolist()


def test_slots_are_those_of_the_request_table() -> None:
    table = torch.arange(200).view(2, 100).flip(1)
    slots = torch.full((3, 4), 7, dtype=torch.int32)
    load_sample_slots(
        torch.tensor([1, 0]), torch.tensor([60, 6]), table, slots, num_sink=2, num_recent=4
    )
    offsets, _ = sample_offsets(torch.tensor(54), 4)
    assert slots[0].tolist() == [int(table[1, 2 + x]) for x in offsets.tolist()]
    assert slots[1].tolist() == [0] * 4
    assert slots[2].tolist() == [7] * 4


@pytest.mark.parametrize("num_samples", [0, 3, 1026])
def test_odd_numbers_are_refused(num_samples: int) -> None:
    state = torch.zeros(1, 1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"num_samples={num_samples}"):
        mirror_diff(
            state, state, state.clone(), step=torch.tensor(1), num_protected=0,
            num_target=torch.tensor([0]), hi=torch.tensor([0]), fetch_cap=1,
            log_weight=torch.zeros(1, 1, num_samples),
        )  # fmt: skip
