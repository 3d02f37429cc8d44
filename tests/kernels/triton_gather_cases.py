# SPDX-License-Identifier: Apache-2.0
"""Whole tokens out of a pool in Triton; run by `test_triton_ops` in a process of its own."""

import pytest
import torch
from plain_torch import in_plain_torch

from tandemkv.kernels.triton_ops import gather

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
reference = in_plain_torch("gather")
SLOTS = 900


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("heads", [(1, 10), (2, 64), (8, 128)])
@pytest.mark.parametrize("num_tokens", [0, 1, 77, 700])  # the last one takes several turns
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_tokens_are_copied_bit_by_bit(
    dtype: torch.dtype, heads: tuple[int, int], num_tokens: int, index: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(gather, "_MOST_PROGRAMS", 3)
    generator = torch.Generator().manual_seed(num_tokens)
    nbytes = dtype.itemsize * heads[1]
    bits = torch.randint(256, (2, SLOTS, heads[0], nbytes), dtype=torch.uint8, generator=generator)
    pool = bits.to(DEVICE).view(dtype)  # NaN among them
    order = torch.randperm(SLOTS, generator=generator)[:num_tokens]
    slots = order.to(DEVICE, index)
    found = []
    for module in (reference, gather):
        out = torch.zeros(2, num_tokens + 1, *heads, device=DEVICE).to(dtype)
        module.gather_tokens(*pool, slots, *(part[:num_tokens] for part in out))
        found.append(out.view(torch.uint8))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1][:, :num_tokens].cpu(), bits[:, order])
    assert not found[1][:, num_tokens:].any(), "nothing is written behind the last token"
