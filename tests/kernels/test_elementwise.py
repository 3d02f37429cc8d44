# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding and quantization against float64."""

import pytest
import torch
from in_float64 import rotated
from tolerances import TOLERANCES, Tolerance, assert_close

from tandemkv.kernels.quantize import quantize_int8
from tandemkv.kernels.rope import apply_rope, unapply_rope

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", [1.0, 1.3])
def test_rope_rotates_pairs_half_a_head_apart(dtype: torch.dtype, scaling: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 8).to(dtype)
    inv_freq = 10000.0 ** (-torch.arange(4) / 4)
    positions = torch.tensor([0, 1, 7, 100, 1000], dtype=torch.int32)
    want = rotated(x, positions, inv_freq, scaling)
    got = apply_rope(x, positions, inv_freq, scaling=scaling)
    assert got.dtype == dtype
    loose = Tolerance(abs_error=3e-4, rel_error=3e-4, cosine_gap=1e-6)  # angles in float32
    assert_close(got, want, loose if dtype == torch.float32 else TOLERANCES[dtype])
    assert_close(unapply_rope(got, positions, inv_freq, scaling=scaling), x, TOLERANCES[dtype])


def test_rope_products_depend_on_distance_only() -> None:
    torch.manual_seed(1)
    q, k = torch.randn(2, 1, 2, 64)
    inv_freq = 1e6 ** (-torch.arange(32) / 32)
    near = [apply_rope(x, torch.tensor([p]), inv_freq) for x, p in ((q, 12), (k, 5))]
    far = [apply_rope(x, torch.tensor([p]), inv_freq) for x, p in ((q, 112), (k, 105))]
    loose = Tolerance(abs_error=1e-3, rel_error=1e-3, cosine_gap=1e-6)
    assert_close((near[0] * near[1]).sum(-1), (far[0] * far[1]).sum(-1), loose)


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
    x, positions = torch.zeros(2, 1, 8), torch.zeros(2).long()
    with pytest.raises(ValueError, match=r"inv_freq\.shape=\(3,\)"):
        apply_rope(x, positions, torch.zeros(3))
    with pytest.raises(ValueError, match="scaling=0"):
        unapply_rope(x, positions, torch.zeros(4), scaling=0.0)
    with pytest.raises(ValueError, match=r"positions\.dtype"):
        apply_rope(x, positions.float(), torch.zeros(4))
    with pytest.raises(ValueError, match=r"k\.dtype"):
        quantize_int8(positions.view(2, 1, 1))
