# SPDX-License-Identifier: Apache-2.0
"""Comparison of tensors for tests and reference checks of benchmarks."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """What may differ between a result and its reference.

    Attributes
    ----------
    abs_error, rel_error : float
        ``|actual - expected| <= abs_error + rel_error * |expected|``.
    cosine_gap : float
        The cosine of the two tensors as vectors is at least ``1 - cosine_gap``.
    """

    abs_error: float
    rel_error: float
    cosine_gap: float


EXACT = Tolerance(abs_error=0.0, rel_error=0.0, cosine_gap=1e-12)

# By the least precise dtype that enters the computation.
TOLERANCES = {
    torch.float32: Tolerance(abs_error=2e-5, rel_error=2e-5, cosine_gap=1e-9),
    torch.float16: Tolerance(abs_error=2e-3, rel_error=2e-3, cosine_gap=1e-5),
    torch.bfloat16: Tolerance(abs_error=1.6e-2, rel_error=1.6e-2, cosine_gap=1e-4),
    torch.int8: Tolerance(abs_error=5e-2, rel_error=5e-2, cosine_gap=1e-3),
}


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance | None = None
) -> None:
    """Compare a result with its reference.

    Parameters
    ----------
    actual : torch.Tensor
        The result, any shape, dtype and device.
    expected : torch.Tensor
        The reference, same shape, usually float64.
    tolerance : Tolerance, optional
        By default that of the dtype of `actual`; exact for integers.

    Raises
    ------
    AssertionError
        If shapes differ, if infinities (with signs) or NaN are at different
        places, or if finite elements differ by more than the tolerance in
        absolute, relative or cosine terms.
    """
    tolerance = tolerance or tolerance_of_result(actual)
    if error_ratio(actual, expected, tolerance) > 1:
        raise AssertionError(_difference(actual, expected, tolerance))


def tolerance_of_result(actual: torch.Tensor) -> Tolerance:
    """That of a result's dtype; exact for integers."""
    return TOLERANCES[actual.dtype] if actual.dtype.is_floating_point else EXACT


def error_ratio(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> float:
    """Return the largest error as a part of what `tolerance` allows, by element or by cosine.

    Infinite where shapes differ, and where infinities or NaN are at different places.
    """
    if actual.shape != expected.shape:
        return math.inf
    left, right = _wide(actual), _wide(expected)
    if _num_misplaced(left, right):
        return math.inf
    finite = right.isfinite()
    left, right = left[finite], right[finite]
    if not left.numel():
        return 0.0
    error = (left - right).abs()
    allowed = tolerance.abs_error + tolerance.rel_error * right.abs()
    largest = float(torch.where(error > 0, error / allowed, 0.0).max())
    if not largest:
        return 0.0
    return max(largest, (1 - _cosine(left, right)) / tolerance.cosine_gap)


def _difference(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> str:
    """Say what of a result is beyond its tolerance."""
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    left, right = _wide(actual), _wide(expected)
    if num_wrong := _num_misplaced(left, right):
        return f"inf or NaN at {num_wrong} of {left.numel()} places where they should not be"
    finite = right.isfinite()
    left, right = left[finite], right[finite]
    error = (left - right).abs()
    excess = error - tolerance.abs_error - tolerance.rel_error * right.abs()
    if bool((excess > 0).any()):
        worst = int(excess.argmax())
        return (
            f"{int((excess > 0).sum())} of {error.numel()} elements beyond {tolerance}; worst: "
            f"{left[worst]:.9g}, expected {right[worst]:.9g}; max error {error.max():.3g}"
        )
    return f"cosine {_cosine(left, right):.9f} below {1 - tolerance.cosine_gap:.9f}"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().double()


def _num_misplaced(left: torch.Tensor, right: torch.Tensor) -> int:
    """Count infinities and NaN that only one has, or with another sign."""
    is_same = (left == right) | (left.isnan() & right.isnan())
    is_special = ~left.isfinite() | ~right.isfinite()
    return int((is_special & ~is_same).sum())


def _cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    norms = float(left.norm() * right.norm())
    return float(left @ right) / norms if norms else 1.0
