# SPDX-License-Identifier: Apache-2.0
"""Comparison of tensors for tests and reference checks of benchmarks."""

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
    if tolerance is None:
        tolerance = TOLERANCES[actual.dtype] if actual.dtype.is_floating_point else EXACT
    if actual.shape != expected.shape:
        message = f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        raise AssertionError(message)
    left, right = actual.detach().cpu().double(), expected.detach().cpu().double()
    finite = right.isfinite()
    same_special = torch.equal(left.isnan(), right.isnan()) and torch.equal(
        left[right.isinf()], right[right.isinf()]
    )
    if not same_special or not bool(left[finite].isfinite().all()):
        num_wrong = int(((left != right) & ~(left.isnan() & right.isnan()) & ~finite).sum())
        num_wrong += int((~left[finite].isfinite()).sum())
        message = f"inf or NaN at {num_wrong} of {left.numel()} places where they should not be"
        raise AssertionError(message)
    left, right = left[finite], right[finite]
    if not left.numel():
        return
    error = (left - right).abs()
    excess = error - tolerance.abs_error - tolerance.rel_error * right.abs()
    if bool((excess > 0).any()):
        worst = int(excess.argmax())
        message = (
            f"{int((excess > 0).sum())} of {error.numel()} elements beyond {tolerance}; worst: "
            f"{left[worst]:.9g}, expected {right[worst]:.9g}; max error {error.max():.3g}"
        )
        raise AssertionError(message)
    norms = float(left.norm() * right.norm())
    cosine = float(left @ right) / norms if norms else 1.0
    if cosine < 1 - tolerance.cosine_gap:
        message = f"cosine {cosine:.9f} below {1 - tolerance.cosine_gap:.9f}"
        raise AssertionError(message)
