# SPDX-License-Identifier: Apache-2.0
"""What a launch is said to need of the host's memory."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tandemkv.cache_rank.protocol.errors import UnsupportedModelError
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.server.plan.footprint import Footprint
from tandemkv.server.plan.memory import CACHE_RANK_BYTES, estimate_memory
from tandemkv.server.settings.launch_settings import ServeSettings

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=6,
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    max_context=4096,
    dtype="float32",
    model_hash="0",
)
LAYER_BYTES = 2 * 2 * 8 * 4
"""K and V of one token in one layer."""


def estimate(
    folder: Path, spec: ModelSpec, cache_ranks: int, tensor_parallel: int = 1,
    config: dict[str, int] | None = None, index_dtype: str = "native",
) -> Footprint:  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"dtype": "float32"} | (config or {})))
    settings = ServeSettings.model_validate(
        {
            "model": str(folder), "device": "cpu", "cache_ranks": cache_ranks,
            "tensor_parallel": tensor_parallel, "max_running_requests": 4,
            "cache": {"capacity_tokens": 4096},
            "selection": {"budget_tokens": 128, "index_dtype": index_dtype},
        }
    )  # fmt: skip
    return estimate_memory(settings, spec, folder, device="cpu")


def test_layers_with_a_window_have_room_for_sets_only_in_mapped_memory(tmp_path: Path) -> None:
    hybrid = msgspec.structs.replace(SPEC, windowed_layers=(0, 1, 3, 4))
    row_tokens = ServeSettings.model_validate(
        {"model": "m", "selection": {"budget_tokens": 128}}
    ).selection.row_tokens
    one_layer = 4 * row_tokens * LAYER_BYTES
    for spec, cache_ranks, num_layers in ((SPEC, 0, 6), (hybrid, 0, 2), (hybrid, 1, 6)):
        found = estimate(tmp_path, spec, cache_ranks)
        assert found.kv == 4096 * 6 * LAYER_BYTES
        assert found.resident_set == num_layers * one_layer


def test_an_index_of_int8_is_counted(tmp_path: Path) -> None:
    found = estimate(tmp_path, SPEC, 0, index_dtype="int8")
    assert found.key_index == 4096 * 6 * SPEC.num_kv_heads * (SPEC.head_dim + 4)
    assert estimate(tmp_path, SPEC, 0).key_index == 0


def test_states_take_the_place_of_k_and_v(tmp_path: Path) -> None:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
              "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}  # fmt: skip
    spec = msgspec.structs.replace(
        SPEC, architecture="Qwen3NextForCausalLM", linear_layers=(0, 1, 3, 4)
    )
    found = estimate(tmp_path, spec, 0, config=linear)
    assert found.kv == 4096 * 2 * LAYER_BYTES
    # A float32 state and three bfloat16 tokens to convolve, of three states for each of four.
    assert found.states == 4 * (4 * 16 * 8 * 4 + 3 * (2 * 2 * 8 + 4 * 16) * 2) * (3 * 4 + 1)
    # W_q without its gates is a copy.
    projection = SPEC.num_qo_heads * SPEC.head_dim * SPEC.hidden_size * 4
    assert found.predictor == 2 * projection
    assert "states 0.00" in found.describe()
    with pytest.raises(UnsupportedModelError, match=r"linear attention .*linear_num_key_heads"):
        estimate(tmp_path, spec, 0)


def test_each_cache_rank_is_a_process(tmp_path: Path) -> None:
    """Two processes of the model with one cache rank, with one each, and with two each."""
    found = [estimate(tmp_path, SPEC, count, 2).runtime for count in (1, 2, 4)]
    assert [size - found[1] for size in found] == [-CACHE_RANK_BYTES, 0, 2 * CACHE_RANK_BYTES]
    assert estimate(tmp_path, SPEC, 0, 2).runtime == found[1]


def test_weights_that_sglang_does_not_load_are_not_counted(tmp_path: Path) -> None:
    """Mistral's checkpoints have all of them twice."""
    for name in ("model", "consolidated"):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(1000))
    twice = estimate(tmp_path, SPEC, 0).weights
    (tmp_path / "consolidated.safetensors").unlink()
    assert twice == estimate(tmp_path, SPEC, 0).weights > 0
