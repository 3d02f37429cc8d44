# SPDX-License-Identifier: Apache-2.0
"""Triton kernels against the references; run by `test_triton_ops` in a process of its own."""

import math

import pytest
import torch
from tolerances import TOLERANCES, assert_close

from tandemkv.kernels.reference import attention, merge, pack, scatter
from tandemkv.kernels.triton_ops import attention as triton_attention
from tandemkv.kernels.triton_ops import merge as triton_merge
from tandemkv.kernels.triton_ops import pack as triton_pack
from tandemkv.kernels.triton_ops import scatter as triton_scatter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16 as if its bits were integers.
MULTIPLIED = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
COPIED = [torch.float32, torch.bfloat16, torch.int8]


def random_bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return bits.view(dtype).to(DEVICE)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", COPIED)
@pytest.mark.parametrize(("heads", "cap", "dim"), [(2, 5, 7), (1, 1, 16), (3, 8, 32)])
def test_gather_pack(dtype: torch.dtype, heads: int, cap: int, dim: int) -> None:
    torch.manual_seed(0)
    k_pool, v_pool = random_bits(2, 30, heads, dim, dtype=dtype)
    v_pool = v_pool.transpose(0, 1).contiguous().transpose(0, 1)  # other strides than k's
    slots = torch.stack([torch.randperm(30)[:20] for _ in range(2)]).to(DEVICE)
    fetch = torch.randint(-3, 20, (2, heads, cap), dtype=torch.int32, device=DEVICE)
    fetch[0, 0] = -1
    want = random_bits(2, 2, heads, cap, dim, dtype=dtype)
    got = want.clone()
    pack.gather_pack(k_pool, v_pool, slots, fetch, want[0], want[1])
    triton_pack.gather_pack(k_pool, v_pool, slots, fetch, got[0], got[1])
    assert same_bits(got, want)


@pytest.mark.parametrize("dtype", COPIED)
@pytest.mark.parametrize("keeps_positions", [True, False])
def test_scatter_pack(dtype: torch.dtype, keeps_positions: bool) -> None:
    torch.manual_seed(1)
    heads, cap, dim, num_slots = 2, 6, 12, 11
    want = random_bits(2, 5, num_slots, heads, dim, dtype=dtype)
    got = want.clone()
    rows = torch.tensor([4, 1, 3], dtype=torch.int32, device=DEVICE)
    order = [torch.randperm(num_slots)[:cap] for _ in range(3 * heads)]
    fetch_slot = torch.stack(order).view(3, heads, cap).int().to(DEVICE)
    fetch_slot[:, :, 2] = -1
    fetch_slot[1, 0] = -1
    packs = random_bits(2, 3, heads, cap, dim, dtype=dtype)
    fetch_pos = torch.randint(0, 99, fetch_slot.shape, dtype=torch.int32, device=DEVICE)
    positions = torch.full((2, 5, heads, num_slots), -1, dtype=torch.int32, device=DEVICE)
    for run, res, pos in (
        (scatter.scatter_pack, want, positions[0]),
        (triton_scatter.scatter_pack, got, positions[1]),
    ):
        kept = {"pos_res": pos, "fetch_pos": fetch_pos} if keeps_positions else {}
        run(res[0], res[1], rows, fetch_slot, packs[0], packs[1], **kept)
    assert same_bits(got, want)
    assert torch.equal(positions[0], positions[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    outs = torch.randn(2, 6, 3, 10, device=DEVICE).to(dtype)
    logs = (torch.randn(2, 6, 3) * 4).to(DEVICE)
    logs[0, 1], logs[1, 2], logs[:, 3] = -math.inf, -math.inf, -math.inf
    logs[0, 4], logs[1, 4] = 1e38, -1e38
    outs[0, 1], outs[1, 2], outs[:, 3] = math.nan, math.nan, math.nan
    outs[1] = outs[1].flip(-1)
    want = merge.merge_attention(outs[0], logs[0], outs[1], logs[1])
    got = triton_merge.merge_attention(outs[0], logs[0], outs[1], logs[1])
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])
    assert got[0].dtype == dtype


@pytest.mark.parametrize("dtype", MULTIPLIED)
@pytest.mark.parametrize(
    ("group", "dim", "num_slots"), [(1, 16, 1), (3, 20, 65), (4, 64, 300), (8, 128, 600)]
)
def test_attend_resident(dtype: torch.dtype, group: int, dim: int, num_slots: int) -> None:
    torch.manual_seed(3)
    heads, rows = 2, torch.tensor([3, 0, 1], device=DEVICE)
    k_res, v_res = torch.randn(2, 4, num_slots, heads, dim, device=DEVICE).to(dtype)
    visible = torch.rand(3, num_slots, device=DEVICE) < 0.6
    visible[0, 0], visible[1] = True, False
    for req, row in enumerate(rows.tolist()):
        k_res[row][~visible[req]] = math.nan
        v_res[row][~visible[req]] = math.nan
    q = torch.randn(3, heads * group, dim, device=DEVICE).to(dtype)
    want = attention.attend_resident(q, k_res, v_res, rows, visible, scale=dim**-0.5)
    got = triton_attention.attend_resident(q, k_res, v_res, rows, visible, scale=dim**-0.5)
    assert got[0].dtype == torch.float32
    assert_close(got[0], want[0], TOLERANCES[dtype])
    assert_close(got[1], want[1], TOLERANCES[dtype])
