# SPDX-License-Identifier: Apache-2.0
"""RoPE and paged attention in Triton; run by `test_triton_ops` in a process of its own."""

import math

import pytest
import torch
from tolerances import TOLERANCES, assert_close

from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.triton_ops import attention as triton_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16 as if its bits were integers.
MULTIPLIED = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def on_cpu(*tensors: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_paged` in plain torch, which is for a CPU."""
    return attend_paged(*(tensor.cpu() for tensor in tensors), scale=scale)


@pytest.mark.parametrize("dtype", MULTIPLIED)
@pytest.mark.parametrize(
    ("group", "dim", "max_len"), [(1, 16, 1), (3, 20, 65), (4, 64, 300), (8, 128, 700)]
)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_attend_paged(
    dtype: torch.dtype, group: int, dim: int, max_len: int, slot_dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    heads, num_slots = 2, 1500
    k_pool, v_pool = torch.randn(2, num_slots, heads, dim, device=DEVICE).to(dtype)
    v_pool = v_pool.transpose(0, 1).contiguous().transpose(0, 1)  # other strides than k's
    order = torch.randperm(num_slots)
    slots = torch.stack([order[:max_len], order[max_len : 2 * max_len], order[:max_len].flip(0)])
    slots = slots.to(DEVICE, slot_dtype)
    hi = torch.tensor([max_len, 0, max(1, max_len // 3)], device=DEVICE)
    unseen = torch.ones(num_slots, dtype=torch.bool)
    unseen[slots[0].long().cpu()] = False
    k_pool[unseen], v_pool[unseen] = math.nan, math.nan
    q = torch.randn(3, heads * group, dim, device=DEVICE).to(dtype)
    want = on_cpu(q, k_pool, v_pool, slots, hi, scale=dim**-0.5)
    got = triton_attention.attend_paged(q, k_pool, v_pool, slots, hi, scale=dim**-0.5)
    assert got[0].dtype == got[1].dtype == torch.float32
    assert_close(got[0], want[0], TOLERANCES[dtype])
    assert_close(got[1], want[1], TOLERANCES[dtype])
    assert bool(got[1][1].isneginf().all())


@pytest.mark.parametrize("programs", [1, 12, 4096])
@pytest.mark.parametrize(("page_size", "max_pages"), [(16, 40), (64, 11), (128, 3)])
def test_attend_to_pages(
    page_size: int, max_pages: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    monkeypatch.setattr(triton_attention, "_PROGRAMS", programs)
    num_slots, heads = 3 * max_pages * page_size, 2
    k_pool, v_pool = torch.randn(2, num_slots, heads, 32, device=DEVICE).to(torch.float16)
    pages = torch.randperm(num_slots // page_size, dtype=torch.int32).view(3, -1).to(DEVICE)
    longest = max_pages * page_size
    hi = torch.tensor([longest, longest // 2 + 3, 1], device=DEVICE)
    q = torch.randn(3, heads * 4, 32, device=DEVICE).to(torch.float16)
    got = triton_attention.attend_paged(
        q, k_pool, v_pool, pages, hi, scale=0.2, page_size=page_size
    )
    slots = (pages.long()[..., None] * page_size + torch.arange(page_size, device=DEVICE)).flatten(
        1
    )
    want = on_cpu(q, k_pool, v_pool, slots, hi, scale=0.2)
    assert_close(got[0], want[0], TOLERANCES[torch.float16])
    assert_close(got[1], want[1], TOLERANCES[torch.float16])


def test_attend_paged_of_one_head_of_a_pool() -> None:
    torch.manual_seed(4)
    k_pool, v_pool = torch.randn(2, 80, 3, 32, device=DEVICE)
    slots = torch.randperm(80)[None, :70].to(DEVICE)
    hi, q = torch.tensor([70], device=DEVICE), torch.randn(1, 2, 32, device=DEVICE)
    pools = k_pool[:, 1:2], v_pool[:, 1:2]
    want = on_cpu(q, *pools, slots, hi, scale=0.2)
    got = triton_attention.attend_paged(q, *pools, slots, hi, scale=0.2)
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


def test_nothing_to_attend_to() -> None:
    q, pool = torch.randn(2, 2, 16, device=DEVICE), torch.randn(4, 1, 16, device=DEVICE)
    slots = torch.zeros(2, 0, dtype=torch.int32, device=DEVICE)
    hi = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    out, lse = triton_attention.attend_paged(q, pool, pool, slots, hi, scale=1.0)
    assert not out.any()
    assert bool(lse.isneginf().all())
