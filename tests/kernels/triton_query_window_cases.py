# SPDX-License-Identifier: Apache-2.0
"""Prediction of queries in Triton; run by `test_triton_ops` in a process of its own."""

import pytest
import torch
from plain_torch import in_plain_torch
from tolerances import Tolerance, assert_close

from tandemkv.kernels.triton_ops import query_window as triton_query_window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
reference = in_plain_torch("query_window")
# The weights come out of linear systems: their condition multiplies the rounding of float32.
SOLVED = Tolerance(abs_error=3e-4, rel_error=3e-4, cosine_gap=1e-7)


def ridge(window: torch.Tensor, counts: torch.Tensor, **settings: object) -> torch.Tensor:
    """Predict from windows ``[..., W + 1, D]`` whose newest queries are pushed last."""
    *_, size, dim = window.shape
    flat = window.reshape(-1, size, dim)
    windows = flat.new_zeros(len(flat), size + 1, 1, dim)
    windows[:, :size, 0] = flat
    rows, last = torch.arange(len(flat), device=DEVICE), torch.full_like(counts.flatten(), size - 1)
    got = triton_query_window.push_and_predict(
        flat[:, -1:], rows, last, windows, size - counts.flatten(), prediction="ridge",
        cos=None, sin=None, **settings,
    )  # fmt: skip
    return got.view(*counts.shape, dim)


@pytest.mark.parametrize("normalise", ["softmax", "none"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("size", "dim"), [(1, 8), (5, 20), (16, 128)])
def test_ridge(normalise: str, sign: int, size: int, dim: int) -> None:
    torch.manual_seed(size)
    # Random walks, as queries of consecutive steps are: the systems are not near the identity.
    window = torch.randn(4, 2, size + 1, dim, device=DEVICE).cumsum(-2)
    counts = torch.tensor([1, 2, size // 2 + 1, size + 1], device=DEVICE)[:, None].expand(4, 2)
    spoiled = window.clone()
    for row, count in enumerate(counts[:, 0].tolist()):
        spoiled[row, :, : size + 1 - count] = float("nan")
    settings = {"eps": 0.03, "sign": sign, "normalise": normalise}
    want = reference.ridge_predict(window.double(), counts, **settings)
    assert_close(ridge(spoiled, counts, **settings), want, SOLVED)


@pytest.mark.parametrize("normalise", ["softmax", "none"])
def test_ridge_of_repeated_queries(normalise: str) -> None:
    torch.manual_seed(3)
    window = torch.randn(2, 2, 1, 32, device=DEVICE).repeat(1, 1, 17, 1)  # Gram of rank 1
    counts = torch.full((2, 2), 17, device=DEVICE)
    settings = {"eps": 1e-2, "sign": 1, "normalise": normalise}
    want = reference.ridge_predict(window.double(), counts, **settings)
    assert_close(ridge(window, counts, **settings), want, SOLVED)


@pytest.mark.parametrize("normalise", ["softmax", "none"])
def test_ridge_stays_finite(normalise: str) -> None:
    windows = [torch.zeros(5, 16), torch.ones(5, 16), torch.full((5, 16), 3e18)]
    counts = torch.full((3,), 5, device=DEVICE)
    got = ridge(torch.stack(windows).to(DEVICE), counts, eps=0.0, sign=1, normalise=normalise)
    assert got.isfinite().all()
    assert not got[0].any()
    if normalise == "softmax":  # whatever the weights, they sum to 1
        assert_close(got[1:], torch.stack(windows[1:])[:, 0], SOLVED)


def test_an_infinite_query_spoils_only_the_sizes_it_is_in() -> None:
    torch.manual_seed(4)
    window = torch.randn(1, 7, 16, device=DEVICE)
    window[:, 0] = float("inf")
    counts = torch.tensor([7], device=DEVICE)
    settings = {"eps": 0.03, "sign": 1, "normalise": "softmax"}
    got = ridge(window, counts, **settings)
    want = reference.ridge_predict(window[:, 1:].double(), counts - 1, **settings)
    assert_close(got, want, SOLVED)


@pytest.mark.parametrize("prediction", ["ridge", "mean"])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_push_and_predict(prediction: str, rotates: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    size, heads, dim, num_rows = 16 if prediction == "ridge" else 20, 2, 24, 6
    windows = torch.randn(num_rows, size + 2, heads, dim, device=DEVICE).to(dtype)
    expected = windows.clone()
    starts = torch.full((num_rows,), 1 << 62, device=DEVICE)
    starts[[2, 3, 5]] = torch.tensor([0, 97, 130], device=DEVICE)
    angles = torch.rand(size + 1, dim // 2, device=DEVICE) * 6
    tables = {"cos": angles.cos(), "sin": angles.sin()} if rotates else {"cos": None, "sin": None}
    settings = {"eps": 0.03, "sign": 1, "normalise": "softmax", "prediction": prediction, **tables}
    rows = torch.tensor([5, 2, 0, 3], device=DEVICE)
    positions = torch.tensor([130, 47, 0, 100], device=DEVICE)
    for _ in range(4):
        query = torch.randn(4, 2 * heads, dim, device=DEVICE)[:, ::2].to(dtype)
        got = triton_query_window.push_and_predict(
            query, rows, positions, windows, starts, **settings
        )
        want = reference.push_and_predict(query, rows, positions, expected, starts, **settings)
        assert got.dtype == torch.float32
        assert_close(got, want, SOLVED)
        assert torch.equal(windows, expected)
        positions = positions + 1
