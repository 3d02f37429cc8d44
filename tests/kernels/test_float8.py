# SPDX-License-Identifier: Apache-2.0
"""K and V in FP8: every operation reads the numbers that they hold."""

import pytest
import torch

from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.quantize import quantize_int8
from tandemkv.kernels.score import KeyScan, score_keys


def test_the_references_read_what_the_bytes_stand_for() -> None:
    torch.manual_seed(1)
    k, v = torch.randn(2, 90, 2, 16).to(torch.float8_e4m3fn)
    q, hi = torch.randn(1, 4, 16), torch.tensor([70])
    slots = torch.randperm(90)[None]
    for got, want in zip(
        attend_paged(q, k, v, slots, hi, scale=0.25),
        attend_paged(q, k.float(), v.float(), slots, hi, scale=0.25),
        strict=True,
    ):
        assert torch.equal(got, want)
    ranges = (torch.tensor([3]), hi)
    got, want = (
        score_keys(KeyScan(q, keys, slots, *ranges, width=80, scale=0.25))
        for keys in (k, k.float())
    )
    assert torch.equal(got, want)
    for got, want in zip(quantize_int8(k), quantize_int8(k.float()), strict=True):
        assert torch.equal(got, want)


def test_other_bytes_are_refused() -> None:
    pool = torch.zeros(4, 1, 8).to(torch.float8_e5m2)
    slots = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"k_pool\.dtype=torch\.float8_e5m2"):
        attend_paged(torch.zeros(1, 1, 8), pool, pool, slots, torch.tensor([1]), scale=1.0)
