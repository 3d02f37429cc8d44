# SPDX-License-Identifier: Apache-2.0
"""The predictors against examples worked by hand, and against the equations one by one."""

import math

import in_float64
import pytest
import torch

from tandemkv.kernels.query_window import mean_predict, ridge_predict


def window_of(*queries):
    return torch.tensor(queries, dtype=torch.float64)


def ridge(window, count, *, eps=1e-2, sign=1, normalise="softmax"):
    return ridge_predict(window, torch.tensor(count), eps=eps, sign=sign, normalise=normalise)


def test_ridge_by_hand_with_one_predecessor():
    # G = 4 + 0.5 * 4 = 6, b = 2 * 3 = 6, w = 1: the prediction is the newest query.
    got = ridge(window_of([2.0, 0.0], [3.0, 1.0]), 2, eps=0.5, normalise="none")
    assert got.tolist() == pytest.approx([3.0, 1.0])


def test_ridge_by_hand_with_two_predecessors():
    # q0 = (1, 0), q1 = (0, 2), q2 = (1, 2); eps = 1 is 1 for k = 2's mean (1 + 4) / 2 = 2.5.
    # k = 1: G = 4 + 4 = 8, b = 4, w = 1/2;  prediction 1/2 q2 = (0.5, 1).
    # k = 2: G = diag(3.5, 6.5), b = (1, 4), w = (2/7, 8/13);
    #        prediction 2/7 q1 + 8/13 q2 = (8/13, 4/7 + 16/13).
    window = window_of([1.0, 0.0], [0.0, 2.0], [1.0, 2.0])
    got = ridge(window, 3, eps=1.0, normalise="none")
    want = [(0.5 + 8 / 13) / 2, (1 + 4 / 7 + 16 / 13) / 2]
    assert got.tolist() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_ridge_softmax_by_hand(sign):
    # As above, k = 2 only through the softmax; k = 1 has weight 1: prediction q2.
    window = window_of([1.0, 0.0], [0.0, 2.0], [1.0, 2.0])
    got = ridge(window, 3, eps=1.0, sign=sign)
    first, second = math.exp(sign * 2 / 7), math.exp(sign * 8 / 13)
    weights = [first / (first + second), second / (first + second)]
    want = [(1 + weights[1]) / 2, (2 + 2 * weights[0] + 2 * weights[1]) / 2]
    assert got.tolist() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("normalise", ["softmax", "none"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("count", [2, 5, 9])
def test_ridge_follows_the_equations(normalise, sign, count):
    torch.manual_seed(count)
    window = torch.randn(3, 2, 9, 6, dtype=torch.float64)
    counts = torch.full((3, 2), count)
    got = ridge_predict(window, counts, eps=0.03, sign=sign, normalise=normalise)
    for row in range(3):
        for head in range(2):
            want = in_float64.ridge(
                window[row, head, -count:], eps=0.03, sign=sign, normalise=normalise
            )
            torch.testing.assert_close(got[row, head], want, rtol=1e-9, atol=1e-9)


def test_ridge_ignores_places_that_are_not_filled():
    torch.manual_seed(0)
    window = torch.randn(5, 9, 4)
    counts = torch.tensor([1, 2, 3, 8, 9])
    spoiled = window.clone()
    for row, count in enumerate(counts.tolist()):
        spoiled[row, : 9 - count] = float("nan")
    settings = {"eps": 1e-2, "sign": 1, "normalise": "softmax"}
    want = ridge_predict(window, counts, **settings)
    assert torch.equal(ridge_predict(spoiled, counts, **settings), want)
    assert torch.equal(want[0], window[0, -1])  # no predecessor: the newest query


def test_ridge_of_an_autoregressive_sequence_continues_it():
    # q_{t+1} = a q_t exactly: the regression finds a, whatever the size.
    start, factor = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), 0.9
    window = torch.stack([start * factor**t for t in range(6)])
    got = ridge(window, 6, eps=0.0, normalise="none")
    torch.testing.assert_close(got, start * factor**6, rtol=1e-4, atol=1e-6)


def test_sizes_whose_system_float32_cannot_solve_are_left_out(monkeypatch):
    factored, failed = torch.linalg.cholesky_ex, []

    def noted(system):
        factor, info = factored(system)
        failed.append(int((info > 0).sum()))
        return factor, info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", noted)
    torch.manual_seed(4)
    window = 3 * torch.randn(1, 1, 128) + 1e-3 * torch.randn(8, 17, 128)  # queries nearly alike
    counts, settings = torch.full((8,), 17), {"eps": 0.0, "sign": 1, "normalise": "none"}
    got = ridge_predict(window, counts, **settings)
    want = ridge_predict(window.double(), counts, **settings)
    assert failed[0] > 0
    assert failed[1] == 0
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-2)


@pytest.mark.parametrize("normalise", ["softmax", "none"])
def test_ridge_stays_finite(normalise):
    for window in (torch.zeros(4, 3), torch.ones(4, 3), torch.full((4, 3), 1e18)):
        got = ridge(window, 4, eps=0.0, normalise=normalise)
        assert got.isfinite().all()


def test_mean_counts_what_is_there():
    window = window_of([100.0, 100.0], [1.0, 3.0], [3.0, 5.0])
    assert mean_predict(window, torch.tensor(2)).tolist() == [2.0, 4.0]
    assert mean_predict(window, torch.tensor(1)).tolist() == [3.0, 5.0]
