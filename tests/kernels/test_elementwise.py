# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding and quantization against float64."""

import pytest
import torch

from tandemkv.kernels.quantize import quantize_int8

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("magnitude", [0.0, 1e-44, 1e-30, 1.0, 1e37])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_is_within_half_a_scale(magnitude: float, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    k = (torch.randn(50, 3, 16) * magnitude).to(dtype)
    k[3] = 0
    quantized, scale = quantize_int8(k)
    assert quantized.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert scale.shape == (50, 3)
    assert (scale > 0).all()
    assert quantized.min() >= -127
    error = (quantized.double() * scale.double()[..., None] - k.double()).abs()
    assert (error <= scale.double()[..., None] * 0.50001).all()
    if magnitude >= 1e-30:
        used = quantized.abs().amax(-1)
        assert (used[[n for n in range(50) if n != 3]] == 127).all()


def test_bad_arguments() -> None:
    positions = torch.zeros(2).long()
    with pytest.raises(ValueError, match=r"k\.dtype"):
        quantize_int8(positions.view(2, 1, 1))
