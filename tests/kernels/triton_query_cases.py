# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of predicted queries; run by `test_triton_ops` in a process of its own."""

from dataclasses import replace

import pytest
import torch
from query_inputs import FORMS, predict_in_float64, query_inputs, tolerance_of, with_int8
from tolerances import assert_close

from tandemkv.kernels.query import QueryWeights
from tandemkv.kernels.triton_ops import query as triton_query

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 128, 3, 16), (5, 300, 2, 24), (9, 64, 40, 8), (3, 1200, 1, 64)]
if DEVICE == "cuda":
    SIZES += [(8, 4096, 32, 128), (1, 4096, 32, 128), (70, 2560, 20, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("has_bias", "has_norm"), [(False, False), (True, False), (True, True)])
def test_equals_float64(
    dtype: torch.dtype, sizes: tuple[int, int, int, int], has_bias: bool, has_norm: bool
) -> None:
    given = query_inputs(sizes, dtype, DEVICE, has_bias=has_bias, has_norm=has_norm)
    got = triton_query.predict_query(*given)
    assert got.dtype == dtype
    assert_close(got, predict_in_float64(*given), tolerance_of(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("has_norm", [False, True])
def test_int8_equals_float64(
    dtype: torch.dtype, sizes: tuple[int, int, int, int], has_norm: bool
) -> None:
    given = query_inputs(sizes, dtype, DEVICE, has_bias=has_norm, has_norm=has_norm)
    given = with_int8(given)
    got = triton_query.predict_query(*given)
    assert got.dtype == dtype
    assert_close(got, predict_in_float64(*given), tolerance_of(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_int8", [False, True])
def test_other_forms_equal_float64(dtype: torch.dtype, form: str, is_int8: bool) -> None:
    given = query_inputs((5, 300, 3, 24), dtype, DEVICE, has_bias=True, has_norm=True, form=form)
    given = with_int8(given) if is_int8 else given
    assert_close(
        triton_query.predict_query(*given), predict_in_float64(*given), tolerance_of(dtype)
    )


def test_a_norm_over_many_heads_equals_float64() -> None:
    """More elements than are squared at once, and no multiple of them."""
    given = query_inputs(
        (3, 128, 27, 24), torch.float32, DEVICE, has_bias=False, has_norm=True, form="layer"
    )
    want = predict_in_float64(*given)
    assert_close(triton_query.predict_query(*given), want, tolerance_of(torch.float32))


def test_every_code_is_multiplied_exactly() -> None:
    """One hidden state of 1, and so a query of the codes themselves, in eighths."""
    codes = torch.arange(-127, 129, device=DEVICE).clamp(max=127).to(torch.int8)[:, None]
    weights = QueryWeights(
        head_dim=64,
        norm=torch.ones(16, device=DEVICE, dtype=torch.bfloat16),
        norm_eps=0.0,
        weight=torch.nn.functional.pad(codes, (0, 15)).contiguous(),
        weight_scale=torch.full((256,), 0.125, device=DEVICE),
    )
    hidden = torch.zeros(1, 16, device=DEVICE, dtype=torch.bfloat16)
    hidden[0, 0] = 1.0  # The norm makes it 4.
    unturned = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), -1).to(DEVICE)
    at = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    got = triton_query.predict_query(hidden, at, weights, unturned)
    assert torch.equal(got.flatten().float(), codes[:, 0].float() / 2)


def test_large_hidden_values_stay_inside_float16() -> None:
    given = query_inputs((2, 128, 2, 16), torch.float16, DEVICE, has_bias=False, has_norm=True)
    given = given._replace(hidden=given.hidden * 0 + 30000.0)
    given.weights.norm.fill_(8.0)
    got = triton_query.predict_query(*given)
    assert_close(got, predict_in_float64(*given))


def test_positions_of_rows_that_nobody_reads() -> None:
    given = query_inputs((3, 64, 2, 8), torch.float32, DEVICE, has_bias=False, has_norm=False)
    wild = given._replace(positions=torch.tensor([7, -1, 10**6], device=DEVICE))
    good = given._replace(positions=torch.tensor([7, 0, 0], device=DEVICE))
    got, want = (triton_query.predict_query(*x) for x in (wild, good))
    assert torch.equal(got[0], want[0])
    assert bool(got.isfinite().all())


def test_sparse_vectors_are_refused() -> None:
    given = query_inputs((2, 64, 2, 8), torch.float32, DEVICE, has_bias=True, has_norm=True)
    given = with_int8(given)
    for name in ("bias", "query_norm", "norm", "weight_scale"):
        vector = getattr(given.weights, name).repeat_interleave(2)[::2]
        weights = replace(given.weights, **{name: vector})
        with pytest.raises(ValueError, match="dense in their last dimension"):
            triton_query.predict_query(*given._replace(weights=weights))


def test_huge_products_are_cut_off_in_float16() -> None:
    given = query_inputs((1, 64, 2, 8), torch.float16, DEVICE, has_bias=False, has_norm=True)
    given = given._replace(hidden=given.hidden * 0 + 60000.0)
    given.weights.norm.fill_(200.0)
    assert bool(triton_query.predict_query(*given).isfinite().all())
