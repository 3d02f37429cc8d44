# SPDX-License-Identifier: Apache-2.0
"""Changed rows of resident sets in Triton; run by `test_triton_ops` in a process of its own."""

import pytest
import torch
from plain_torch import in_plain_torch

from tandemkv.kernels.triton_ops import changed_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
reference = in_plain_torch("changed_rows")
NUM_ROWS, HEADS = 5, 3
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
# num_slots, cap, share of slots that differ
SIZES = pytest.mark.parametrize(
    "sizes", [(7, 4, 0.3), (40, 40, 1.0), (1100, 300, 0.4), (70, 20, 0.1), (33, 16, 0.0)]
)
INDEX = pytest.mark.parametrize("index", [torch.int32, torch.int64])


def _sets(seed: int, num_slots: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """K and V ``[2, rows, slots, H, D]`` in wider memory, so that strides count."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(2, NUM_ROWS, num_slots + 3, HEADS, dim, generator=generator)
    return wide.to(DEVICE, dtype)[:, :, :num_slots]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@DTYPES
@SIZES
@INDEX
@pytest.mark.parametrize("dim", [10, 64])
def test_taken_and_put(
    dtype: torch.dtype, sizes: tuple[int, int, float], index: torch.dtype, dim: int
) -> None:
    num_slots, cap, share = sizes
    generator = torch.Generator().manual_seed(num_slots)
    shape = (NUM_ROWS, HEADS, num_slots)
    before = torch.randint(1000, shape, generator=generator).int().to(DEVICE)
    differs = (torch.rand(shape, generator=generator) < share).to(DEVICE)
    positions = torch.where(differs, before + 1000, before)
    rows = torch.tensor([3, 0, 1, 4], device=DEVICE, dtype=index)
    active = torch.tensor([True, False, True, True], device=DEVICE)
    near, far = _sets(1, num_slots, dim, dtype), _sets(2, num_slots, dim, dtype)
    found = []
    for module in (reference, changed_rows):
        sent, sets = before.clone(), near.clone()
        slots = torch.full((4, HEADS, cap), -7, dtype=torch.int32, device=DEVICE)
        buffer = torch.zeros(2, 4, HEADS, cap, dim, device=DEVICE).to(dtype)
        module.take_changed_rows(positions, sent, *far, rows, active, slots, *buffer)
        module.put_changed_rows(slots, *buffer, rows, *sets)
        found.append((slots, buffer, sent, sets))
    for want, got in zip(*found, strict=True):
        assert _same(want.contiguous(), got.contiguous())
    slots, _, sent, _ = found[1]
    counts = differs[rows.long()].sum(-1).clamp(max=cap) * active[:, None]
    assert torch.equal((slots >= 0).sum(-1), counts)
    if share < 1.0 and cap == num_slots:
        assert torch.equal(sent[rows.long()[active]], positions[rows.long()[active]])
