# SPDX-License-Identifier: Apache-2.0
"""Predicted queries: the reference against float64, and the Triton kernels without a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from own_process import run_cases
from query_inputs import predict_in_float64, query_inputs

from tandemkv.kernels.query import QueryWeights, predict_query
from tandemkv.kernels.testing import assert_close


def test_triton_kernels_equal_float64(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run_cases("triton_query_cases.py", tmp_path)


@pytest.mark.parametrize(("has_bias", "has_norm"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_equals_float64(has_bias: bool, has_norm: bool, dtype: torch.dtype) -> None:
    given = query_inputs((5, 96, 3, 16), dtype, "cpu", has_bias=has_bias, has_norm=has_norm)
    before = given.hidden.clone()
    got = predict_query(*given)
    assert torch.equal(given.hidden, before)
    want = predict_in_float64(*given)
    if dtype == torch.float32:
        assert_close(got, want)
    else:
        assert float((got.double() - want).abs().max()) < 0.06
        assert float(torch.cosine_similarity(got.double(), want, dim=-1).min()) > 0.9999


def test_by_hand() -> None:
    """One head of two, a hidden state of (3, 4): the norm makes it (3, 4) / sqrt(12.5)."""
    weights = QueryWeights(
        norm=torch.ones(2), norm_eps=0.0, weight=torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    )
    quarter_turn = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # cosine and sine, positions 0 and 1
    hidden = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    got = predict_query(hidden, torch.tensor([0, 1]), weights, quarter_turn)
    root = 12.5**0.5
    want = torch.tensor([[[3 / root, 8 / root]], [[-8 / root, 3 / root]]])
    torch.testing.assert_close(got, want)


def test_errors_say_what_is_required() -> None:
    given = query_inputs((2, 8, 2, 4), torch.float32, "cpu", has_bias=True, has_norm=True)
    with pytest.raises(ValueError, match=r"weights.weight.dtype"):
        predict_query(*given._replace(hidden=given.hidden.bfloat16()))
    wrong = replace(given.weights, query_norm=torch.ones(6))
    with pytest.raises(ValueError, match=r"weights.query_norm.shape"):
        predict_query(*given._replace(weights=wrong))
    with pytest.raises(ValueError, match="epsilons"):
        predict_query(*given._replace(weights=replace(given.weights, norm_eps=-1.0)))
