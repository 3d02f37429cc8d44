# SPDX-License-Identifier: Apache-2.0
"""How much an inference rank of another host may have held, besides what both ends derive."""

from __future__ import annotations

import re

import pytest
import torch

from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.memory.descriptor_messages import TensorSpec
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.message.data_plane import TOKEN_BYTES
from tandemkv.cache_rank.protocol.message.letters import CODEC, Meet
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.models.predictor_weights import (
    most_bytes,
    num_positions,
    put_weights,
)
from tandemkv.cache_rank.pump.far_service import check_told
from tandemkv.kernels.query import QueryWeights, quantize_query_weight

_CAPACITY = 50_000
_MODEL = ModelSpec(
    architecture="Any", num_layers=3, num_qo_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512,
    max_context=40_000, dtype="float32", model_hash="",
)  # fmt: skip


def _told(model: ModelSpec, *, is_int8: bool) -> list[TensorSpec]:
    """Return what has all that weights of a prediction can have, in the widest dtype."""
    rows = model.num_qo_heads * model.head_dim
    weight, scale = torch.zeros(rows, model.hidden_size), None
    if is_int8:
        weight, scale = quantize_query_weight(weight, torch.device("cpu"))
    layer = QueryWeights(
        head_dim=model.head_dim, weight=weight, weight_scale=scale, bias=torch.zeros(rows),
        norm=torch.zeros(model.hidden_size), query_norm=torch.zeros(rows),
    )  # fmt: skip
    tensors = MappedTensors()
    table = torch.zeros(num_positions(model, _CAPACITY), model.head_dim)
    put_weights(tensors, [layer] * model.num_layers, table)
    found = list(tensors.specs)
    tensors.close()
    return found


@pytest.mark.parametrize("is_int8", [False, True])
def test_weights_of_the_model_are_held_and_no_more(*, is_int8: bool) -> None:
    told, bound = _told(_MODEL, is_int8=is_int8), most_bytes(_MODEL, _CAPACITY)
    check_told(told, bound)
    nbytes = sum(spec.nbytes for spec in told)
    if not is_int8:
        assert bound < 1.02 * nbytes, "the bound is near what there is"
    with pytest.raises(ProtocolError, match=rf"wants {nbytes} bytes .* {nbytes - 1} at most"):
        check_told(told, nbytes - 1)


def test_a_table_is_no_longer_than_the_context_and_the_pool() -> None:
    assert num_positions(_MODEL, _CAPACITY) == 40_000
    assert num_positions(_MODEL, 30_000) == 30_000
    assert most_bytes(_MODEL, 30_000) < most_bytes(_MODEL, _CAPACITY)


@pytest.mark.parametrize(
    ("each", "said"),
    [
        (TensorSpec("predict_weight", (1 << 40, 1 << 40), "float32", "engine"), "bytes held"),
        (TensorSpec("kv", (1,), "float32", "engine"), "'kv' is none of ours"),
    ],
)
def test_what_is_not_held(each: TensorSpec, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        check_told([each], most_bytes(_MODEL, _CAPACITY))


@pytest.mark.parametrize(
    ("each", "field"),
    [
        (TensorSpec("predict_weight", (1,), "object", "engine"), "[2]"),
        (TensorSpec("predict_weight", (1,), "float32\n", "engine"), "[2]"),
        (TensorSpec("predict_weight", (1,), "float32", "elsewhere"), "[3]"),  # type: ignore[arg-type]
        (TensorSpec("predict_weight", (-1,), "float32", "engine"), "[1]"),
    ],
)
def test_what_is_no_tensor_ends_at_the_door(each: TensorSpec, field: str) -> None:
    frame = CODEC.encode(Meet(1, b"place", b"t" * TOKEN_BYTES, (each,)))
    with pytest.raises(ProtocolError, match=re.escape(field)):
        CODEC.decode(frame)
