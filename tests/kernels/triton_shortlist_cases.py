# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of shortlists; run by `test_triton_shortlist` in a process of its own."""

import math

import pytest
import torch

from tandemkv.kernels.reference import shortlist as reference
from tandemkv.kernels.shortlist import make_shortlist_scratch
from tandemkv.kernels.triton_ops import shortlist as triton_shortlist

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, GROUP, DIM, PAGE, NUM_ROWS, CONTEXT = 2, 3, 40, 16, 5, 400


def inputs(dtype: torch.dtype, num_listed: int) -> dict[str, torch.Tensor]:
    """Four requests; the second is inactive, the third has nothing, the last a short list."""
    torch.manual_seed(num_listed)
    pages = -(-CONTEXT // PAGE)
    slots = torch.randperm(4 * pages).view(4, pages).to(torch.int32)
    positions = torch.full((NUM_ROWS, HEADS, num_listed), -1, dtype=torch.int32)
    for row in range(1, NUM_ROWS):
        for head in range(HEADS):
            found = torch.randperm(350)[: num_listed if row != 4 else num_listed // 3]
            positions[row, head, : len(found)] = found
    found = {
        "q": torch.randn(4, HEADS * GROUP, DIM, dtype=dtype),
        "k_pool": torch.randn(4 * pages * PAGE, HEADS, DIM).to(dtype),
        "slots": slots,
        "positions": positions,
        "covered": torch.tensor([0, 350, 350, 350, 350], dtype=torch.int32),
        "rows": torch.tensor([3, 1, 2, 4]),
        "lo": torch.tensor([4, 4, 4, 30], dtype=torch.int32),
        "hi": torch.tensor([352, 390, 4, 380], dtype=torch.int32),
        "active": torch.tensor([True, False, True, True]),
    }
    return {name: tensor.to(DEVICE) for name, tensor in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling", ["softmax_mean", "max_logit", "mean_logit"])
@pytest.mark.parametrize(("num_listed", "num_new", "k"), [(120, 8, 50), (50, 40, 200), (7, 1, 0)])
def test_equals_the_reference(
    dtype: torch.dtype, pooling: str, num_listed: int, num_new: int, k: int
) -> None:
    given = inputs(dtype, num_listed)
    q = given.pop("q")
    step = torch.tensor(5, dtype=torch.int32, device=DEVICE)
    common = {
        "num_new": num_new, "step": step, "every": 4, "phase": 1, "scale": 0.3,
        "pooling": pooling, "page_size": PAGE,
    }  # fmt: skip
    active = given.pop("active")
    due, want_due = (torch.zeros(4, dtype=torch.bool, device=DEVICE) for _ in range(2))
    args = (given[name] for name in ("k_pool", "slots", "positions", "covered", "rows", "lo", "hi"))
    args = (q, *args, k)
    scratch = make_shortlist_scratch(4, HEADS * GROUP, HEADS, num_listed + num_new, q.device)
    got, got_scores = triton_shortlist.choose_shortlisted(
        *args, active=active, due=due, scratch=scratch, **common
    )
    want, want_scores = reference.choose_shortlisted(
        *args, active=active, due=want_due, scratch=None, **common
    )
    # (5 + 1) % 4 != 0: only who has too many new ones is due.
    assert due.tolist() == want_due.tolist() == [num_new < 2, False, False, num_new < 30]
    torch.testing.assert_close(
        got_scores.sort(-1).values, want_scores.sort(-1).values, rtol=2e-3, atol=1e-5
    )
    exact = dtype == torch.float32
    for one, other in zip(got.flatten(0, 1).tolist(), want.flatten(0, 1).tolist(), strict=True):
        chosen, wanted = {p for p in one if p >= 0}, {p for p in other if p >= 0}
        assert len(chosen) == sum(p >= 0 for p in one) == len(wanted)
        assert one[len(chosen) :] == [-1] * (k - len(chosen))
        assert len(chosen & wanted) >= len(wanted) - (0 if exact else 2)  # rounded near ties


def test_without_candidates_nothing_is_chosen_and_phases_are_due() -> None:
    given = inputs(torch.float32, 20)
    given["positions"].fill_(-1)
    given["covered"].fill_(400)
    due = torch.zeros(4, dtype=torch.bool, device=DEVICE)
    q, active = given.pop("q"), given.pop("active")
    chosen, scores = triton_shortlist.choose_shortlisted(
        q, *given.values(), 9, num_new=4, active=active, due=due, scratch=None, every=3, phase=2,
        step=torch.tensor(4, dtype=torch.int32, device=DEVICE), scale=1.0,
        pooling="softmax_mean", page_size=PAGE,
    )  # fmt: skip
    assert bool((chosen == -1).all())
    assert bool((scores == -math.inf).all())
    assert due.tolist() == [True, False, True, True]


def test_storing_replaces_the_lists_that_are_due() -> None:
    positions = torch.arange(NUM_ROWS * HEADS * 6, dtype=torch.int32, device=DEVICE)
    positions = positions.view(NUM_ROWS, HEADS, 6)
    covered = torch.arange(NUM_ROWS, dtype=torch.int32, device=DEVICE)
    found = -torch.arange(3 * HEADS * 6, dtype=torch.int32, device=DEVICE).view(3, HEADS, 6)
    hi = torch.tensor([70, 80, 90], dtype=torch.int32, device=DEVICE)
    due = torch.tensor([True, False, True], device=DEVICE)
    rows = torch.tensor([4, 0, 2], device=DEVICE)
    want, want_covered = positions.clone(), covered.clone()
    want[4], want[2] = found[0], found[2]
    want_covered[4], want_covered[2] = 70, 90
    for module in (triton_shortlist, reference):
        copies = positions.clone(), covered.clone()
        module.store_shortlist(found, hi, due, rows, *copies)
        assert torch.equal(copies[0], want)
        assert torch.equal(copies[1], want_covered)
