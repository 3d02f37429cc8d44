# SPDX-License-Identifier: Apache-2.0
"""Predicted queries: the reference against float64."""

from dataclasses import replace

import pytest
import torch
from query_inputs import FORMS, predict_in_float64, query_inputs, with_int8
from tolerances import assert_close

from tandemkv.kernels.query import QueryWeights, predict_query, quantize_query_weight


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_int8", [False, True])
def test_other_forms_equal_float64(form: str, is_int8: bool) -> None:
    given = query_inputs(
        (5, 96, 3, 16), torch.float32, "cpu", has_bias=True, has_norm=True, form=form
    )
    given = with_int8(given) if is_int8 else given
    assert_close(predict_query(*given), predict_in_float64(*given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_equals_float64_of_its_codes(dtype: torch.dtype) -> None:
    given = with_int8(query_inputs((5, 96, 3, 16), dtype, "cpu", has_bias=True, has_norm=True))
    got, want = predict_query(*given), predict_in_float64(*given)
    if dtype == torch.float32:
        assert_close(got, want)
    else:
        assert float((got.double() - want).abs().max()) < 0.06
        assert float(torch.cosine_similarity(got.double(), want, dim=-1).min()) > 0.9999


def test_int8_is_as_near_as_its_rounding() -> None:
    """A weight is off by half a scale, a sum by that times its hidden states' magnitudes."""
    given = query_inputs((5, 96, 3, 16), torch.float32, "cpu", has_bias=True, has_norm=False)
    coded = with_int8(given)
    hidden, weights, scale = given.hidden.double(), given.weights, coded.weights.weight_scale
    assert scale is not None
    normed = hidden / (hidden.square().mean(-1, keepdim=True) + weights.norm_eps).sqrt()
    magnitude = (normed * weights.norm.double()).abs().sum(-1)
    first, second = scale.double().view(3, 2, 8).unbind(1)
    # RoPE turns the two errors of a pair: neither is then more than both together.
    bound = (first.square() + second.square()).sqrt().repeat(1, 2) / 2
    error = (predict_query(*coded).double() - predict_in_float64(*given)).abs()
    assert bool((error <= bound * magnitude[:, None, None] + 1e-5).all())
    assert float(error.max()) > 1e-3  # of what is bounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_weight_is_within_half_a_scale(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # More rows than are worked out at once, of unequal size, one of them zero.
    weight = (torch.randn(1100, 24) * torch.logspace(-3, 3, 1100)[:, None]).to(dtype)
    weight[700] = 0.0
    codes, scale = quantize_query_weight(weight[:1090], torch.device("cpu"))
    assert codes.dtype == torch.int8
    assert codes.is_contiguous()
    assert codes.shape == (1090, 24)
    assert scale.shape == (1090,)
    assert int(codes.abs().amax(-1)[torch.arange(1090) != 700].min()) == 127
    assert not bool(codes[700].any())
    error = (codes.double() * scale.double()[:, None] - weight[:1090].double()).abs()
    assert bool((error <= scale.double()[:, None] * 0.50001).all())


def test_by_hand() -> None:
    """One head of two, a hidden state of (3, 4): the norm makes it (3, 4) / sqrt(12.5)."""
    weights = QueryWeights(
        head_dim=2, norm=torch.ones(2), weight=torch.tensor([[1.0, 0.0], [0.0, 2.0]])
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
    codes, scale = quantize_query_weight(given.weights.weight, torch.device("cpu"))
    for weight, wrong_scale, message in (
        (codes, None, r"weights.weight_scale=None: must be given with an int8"),
        (given.weights.weight, scale, r"weights.weight_scale=given"),
        (codes, scale[1:], r"weights.weight_scale.shape"),
        (codes, scale.half(), r"weights.weight_scale.dtype"),
    ):
        wrong = replace(given.weights, weight=weight, weight_scale=wrong_scale)
        with pytest.raises(ValueError, match=message):
            predict_query(*given._replace(weights=wrong))
    with pytest.raises(ValueError, match=r"weights.head_dim=3: must be even, and a divisor of 8"):
        predict_query(*given._replace(weights=replace(given.weights, head_dim=3)))
    with pytest.raises(ValueError, match=r"cos_sin.shape=\(500, 4\).*even and 2 at most"):
        predict_query(*given._replace(weights=replace(given.weights, head_dim=2, query_norm=None)))
    with pytest.raises(ValueError, match="epsilons"):
        predict_query(*given._replace(weights=replace(given.weights, norm_eps=-1.0)))
