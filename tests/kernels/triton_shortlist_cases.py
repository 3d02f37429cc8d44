# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of shortlists; run by `test_triton_shortlist` in a process of its own."""

import math

import pytest
import torch

from tandemkv.kernels.reference import shortlist as reference
from tandemkv.kernels.shortlist import make_shortlist_scratch
from tandemkv.kernels.triton_ops import shortlist as triton_shortlist

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, GROUP, DIM, PAGE = 2, 3, 40, 16
SIZES = [(200, 50), (130, 200), (7, 0), (700, 300)]
if DEVICE == "cuda":
    SIZES += [(4500, 2000)]  # takes the interpreter minutes


def inputs(dtype: torch.dtype, num_listed: int) -> dict[str, torch.Tensor]:
    """Three requests; the second has an empty list, the third a short one."""
    torch.manual_seed(num_listed)
    context = 2 * num_listed + 5
    pages = -(-context // PAGE)
    listed = torch.full((3, HEADS, num_listed), -1, dtype=torch.int32)
    for req, count in ((0, num_listed), (2, num_listed // 3)):
        for head in range(HEADS):
            listed[req, head, :count] = torch.randperm(context)[:count]
    found = {
        "q": torch.randn(3, HEADS * GROUP, DIM, dtype=dtype),
        "k_pool": torch.randn(3 * pages * PAGE, HEADS, DIM).to(dtype),
        "slots": torch.randperm(3 * pages).view(3, pages).to(torch.int32),
        "listed": listed,
    }
    return {name: tensor.to(DEVICE) for name, tensor in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling", ["softmax_mean", "max_logit", "mean_logit"])
@pytest.mark.parametrize(("num_listed", "k"), SIZES)
def test_equals_the_reference(dtype: torch.dtype, pooling: str, num_listed: int, k: int) -> None:
    given = inputs(dtype, num_listed)
    common = {"scale": 0.3, "pooling": pooling, "page_size": PAGE}
    scratch = make_shortlist_scratch(4, HEADS * GROUP, HEADS, num_listed + 9, given["q"].device)
    scratch.logits.fill_(math.nan)
    scratch.part_lse.fill_(math.nan)
    got, got_scores = triton_shortlist.choose_listed(*given.values(), k, scratch=scratch, **common)
    want, want_scores = reference.choose_listed(*given.values(), k, scratch=None, **common)
    torch.testing.assert_close(
        got_scores.sort(-1).values, want_scores.sort(-1).values, rtol=2e-3, atol=1e-5
    )
    allowed = 0 if dtype == torch.float32 else 2  # rounded near ties
    for one, other in zip(got.flatten(0, 1).tolist(), want.flatten(0, 1).tolist(), strict=True):
        chosen, wanted = {p for p in one if p >= 0}, {p for p in other if p >= 0}
        assert len(chosen) == sum(p >= 0 for p in one) == len(wanted)
        assert one[len(chosen) :] == [-1] * (k - len(chosen))
        assert len(chosen & wanted) >= len(wanted) - allowed


def test_lists_too_long_for_registers() -> None:
    given = inputs(torch.float32, 20)
    given["listed"] = torch.zeros((3, HEADS, 20000), dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="must have <= 8192"):
        triton_shortlist.choose_listed(
            *given.values(), 4, scale=1.0, pooling="max_logit", page_size=PAGE, scratch=None
        )
