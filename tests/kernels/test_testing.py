# SPDX-License-Identifier: Apache-2.0
"""The comparison must be able to fail, and dispatch must be what it says."""

import math

import pytest
import torch
from tolerances import EXACT, Tolerance, assert_close, error_ratio

from tandemkv.kernels.check import Dims
from tandemkv.kernels.dispatch import plain, uses_triton

WANT = torch.tensor([1.0, -2.0, math.inf, math.nan, -math.inf], dtype=torch.float64)


def test_equal_tensors_pass() -> None:
    assert_close(WANT.float(), WANT)
    assert_close(torch.zeros(0), torch.zeros(0))
    assert_close(torch.zeros(3), torch.zeros(3))


@pytest.mark.parametrize(
    ("index", "value"),
    [(0, 1.001), (0, math.nan), (0, math.inf), (2, 1.0), (2, -math.inf), (3, 0.0), (4, math.inf)],
)
def test_different_tensors_fail(index: int, value: float) -> None:
    actual = WANT.float()
    actual[index] = value
    with pytest.raises(AssertionError):
        assert_close(actual, WANT)


def test_shape_integers_and_cosine_fail() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.zeros(2, 1), torch.zeros(1, 2))
    with pytest.raises(AssertionError, match="elements"):
        assert_close(torch.tensor([3, 4]), torch.tensor([3, 5]))
    wide = Tolerance(abs_error=10.0, rel_error=0.0, cosine_gap=1e-3)
    with pytest.raises(AssertionError, match="cosine"):
        assert_close(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), wide)


def test_errors_are_parts_of_what_is_allowed() -> None:
    tolerance = Tolerance(abs_error=0.5, rel_error=0.25, cosine_gap=1.0)
    want = torch.tensor([0.0, 2.0, math.inf])
    assert error_ratio(want, want, EXACT) == 0.0
    assert error_ratio(want + torch.tensor([0.25, 0.25, 0.0]), want, tolerance) == 0.5
    assert error_ratio(want + torch.tensor([0.0, 1.5, 0.0]), want, tolerance) == 1.5
    assert error_ratio(want + torch.tensor([0.0, 1e-6, 0.0]), want, EXACT) == math.inf
    assert error_ratio(want[:2], want, tolerance) == math.inf
    assert error_ratio(-want, want, tolerance) == math.inf
    opposite = error_ratio(torch.tensor([0.1]), torch.tensor([-0.1]), tolerance)
    assert opposite == pytest.approx(2.0)  # cosine -1, where 0 is allowed


def test_dispatch() -> None:
    gpu = torch.device("cuda")
    assert uses_triton(gpu)
    assert not uses_triton(torch.device("cpu"))
    assert not plain(uses_triton)(gpu)
    assert uses_triton(gpu)


def test_devices_must_agree() -> None:
    dims = Dims()
    dims.check("a", torch.zeros(2), "n", (torch.float32,))
    with pytest.raises(ValueError, match=r"b\.device=meta: must be cpu"):
        dims.check("b", torch.zeros(2, device="meta"), "n", (torch.float32,))
