# SPDX-License-Identifier: Apache-2.0
"""Decode attention and the merge of its parts, against float64."""

import math

import pytest
import torch
from in_float64 import attended
from tolerances import assert_close

from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.merge import merge_attention

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 24
SCALE = HEAD_DIM**-0.5


@pytest.mark.parametrize("order", ["ascending", "shuffled"])
def test_attend_paged(order: str) -> None:
    torch.manual_seed(1)
    k_pool, v_pool = torch.randn(2, 9000, NUM_KV_HEADS, HEAD_DIM)
    slots = torch.randperm(9000)[None] if order == "shuffled" else torch.arange(9000)[None]
    slots = slots.repeat(4, 1).int()
    slots[:, 8500:] = -1  # beyond every length
    hi = torch.tensor([8500, 0, 1, 137])
    q = torch.randn(4, NUM_QO_HEADS, HEAD_DIM)
    out, lse = attend_paged(q, k_pool, v_pool, slots, hi, scale=SCALE)
    for req, end in enumerate(hi.tolist()):
        index = slots[req, :end].long()
        want = attended(q[req], k_pool[index], v_pool[index], SCALE)
        assert_close(out[req], want[0])
        assert_close(lse[req], want[1])


def test_pages_are_runs_of_slots() -> None:
    torch.manual_seed(5)
    k_pool, v_pool = torch.randn(2, 160, NUM_KV_HEADS, HEAD_DIM)
    pages = torch.tensor([[7, 0, 4], [2, 9, -1]])
    q = torch.randn(2, NUM_QO_HEADS, HEAD_DIM)
    out, lse = attend_paged(
        q, k_pool, v_pool, pages, torch.tensor([45, 17]), scale=SCALE, page_size=16
    )
    for req, slots in enumerate(
        ([*range(112, 128), *range(16), *range(64, 77)], [*range(32, 48), 144])
    ):
        want = attended(q[req], k_pool[slots], v_pool[slots], SCALE)
        assert_close(out[req], want[0])
        assert_close(lse[req], want[1])
    with pytest.raises(ValueError, match="page_size=0"):
        attend_paged(q, k_pool, v_pool, pages, torch.tensor([1, 1]), scale=SCALE, page_size=0)
    with pytest.raises(ValueError, match="max_len=48"):
        attend_paged(q, k_pool, v_pool, pages, torch.tensor([49, 1]), scale=SCALE, page_size=16)


def test_huge_logits() -> None:
    k_pool = torch.zeros(3, 1, 2)
    k_pool[0], k_pool[2] = -1e19, 1e19
    v_pool = torch.arange(6.0).view(3, 1, 2)
    q = torch.full((1, 1, 2), 1e19)
    out, lse = attend_paged(q, k_pool, v_pool, torch.arange(3)[None], torch.tensor([3]), scale=1.0)
    assert out.tolist() == [[[4.0, 5.0]]]
    assert lse.item() == pytest.approx(2e38)


def test_merge_of_parts_in_any_order_is_the_whole() -> None:
    torch.manual_seed(3)
    k_pool, v_pool = torch.randn(2, 50, NUM_KV_HEADS, HEAD_DIM)
    q = torch.randn(1, NUM_QO_HEADS, HEAD_DIM) * 5
    parts = [
        attend_paged(q, k_pool, v_pool, part[None], torch.tensor([part.numel()]), scale=SCALE)
        for part in torch.split(torch.arange(50), [1, 7, 30, 12])
    ]
    want = attended(q[0], k_pool, v_pool, SCALE)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        out, lse = parts[order[0]]
        for index in order[1:]:
            out, lse = merge_attention(out, lse, *parts[index])
        assert_close(out[0], want[0])
        assert_close(lse[0], want[1])


def test_merge_with_empty_parts() -> None:
    out = torch.tensor([[[1.0, 2.0]]])
    lse, empty = torch.tensor([[3.0]]), torch.tensor([[-math.inf]])
    garbage = torch.full_like(out, math.nan)
    for merged in (merge_attention(out, lse, garbage, empty),
                   merge_attention(garbage, empty, out, lse)):  # fmt: skip
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    both = merge_attention(garbage, empty, garbage, empty)
    assert torch.equal(both[0], torch.zeros_like(out))
    assert torch.equal(both[1], empty)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e38])
def test_weights_of_a_merge_add_up_to_one_however_large_the_logits(size: float) -> None:
    lse = torch.tensor([[size]])
    out, total = merge_attention(torch.ones(1, 1, 2), lse, torch.full((1, 1, 2), 3.0), lse)
    assert out.tolist() == [[[2.0, 2.0]]]
    assert total.item() == pytest.approx(size + math.log(2))


def test_merge_far_apart_and_dtype() -> None:
    a, b = torch.ones(1, 2, 4, dtype=torch.bfloat16), torch.full((1, 2, 4), 3.0)
    lse_a, lse_b = torch.tensor([[1e38, 5.0]]), torch.tensor([[-1e38, 5.0]])
    out, lse = merge_attention(a, lse_a, b, lse_b)
    assert out.dtype == torch.bfloat16
    assert out[0, :, 0].tolist() == [1.0, 2.0]
    assert lse[0].tolist() == pytest.approx([1e38, 5.0 + math.log(2)])


def test_bad_arguments() -> None:
    q, pool = torch.zeros(1, 4, 8), torch.zeros(5, 2, 8)
    slots = torch.arange(5)[None]
    with pytest.raises(ValueError, match=r"hi\[0\]=6"):
        attend_paged(q, pool, pool, slots, torch.tensor([6]), scale=1.0)
    with pytest.raises(ValueError, match="slots="):
        attend_paged(q, pool, pool, slots + 1, torch.tensor([5]), scale=1.0)
    with pytest.raises(ValueError, match=r"v_pool\.shape"):
        attend_paged(q, pool, pool[:4], slots, torch.tensor([5]), scale=1.0)
    with pytest.raises(ValueError, match=r"lse_b\.dtype"):
        merge_attention(q, q[..., 0], q, q[..., 0].half())
