# SPDX-License-Identifier: Apache-2.0
"""A model directory is read completely or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandemkv.cache_rank.protocol.errors import UnsupportedModelError
from tandemkv.cache_rank.protocol.model_spec import ModelSpec, model_hash, read_model_spec

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 48,
    "max_position_embeddings": 512,
}


def _write(path: Path, **changes: object) -> Path:
    config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_shape_is_read(tmp_path: Path) -> None:
    spec = read_model_spec(_write(tmp_path), dtype="float32")
    assert (spec.num_layers, spec.num_qo_heads, spec.num_kv_heads) == (3, 6, 2)
    assert (spec.head_dim, spec.hidden_size, spec.max_context) == (8, 48, 512)
    assert spec.gqa_group_size == 3
    assert spec.scale == pytest.approx(8**-0.5)
    assert read_model_spec(tmp_path, dtype="float32", max_context=64).max_context == 64


def test_the_longest_contexts_there_are_fit_into_a_message(tmp_path: Path) -> None:
    spec = read_model_spec(_write(tmp_path, max_position_embeddings=1 << 22), dtype="float32")
    frame = msgspec.msgpack.encode(spec)
    assert msgspec.msgpack.decode(frame, type=ModelSpec) == spec


def test_head_dim_may_be_given(tmp_path: Path) -> None:
    assert read_model_spec(_write(tmp_path, head_dim=16), dtype="float32").head_dim == 16


def test_without_kv_heads_each_head_has_its_own(tmp_path: Path) -> None:
    spec = read_model_spec(_write(tmp_path, num_key_value_heads=None), dtype="float32")
    assert spec.num_kv_heads == 6


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3"),
        ({"architectures": None}, "unknown"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding-window"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": "many"}, "garbles"),
        ({"num_attention_heads": 0}, "garbles"),
        ({"max_position_embeddings": 1 << 25}, "garbles.*<= 16777216"),
        ({"num_key_value_heads": 4}, "must be a multiple"),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        read_model_spec(_write(tmp_path, **changes), dtype="float32")


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_unreadable_config_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        read_model_spec(tmp_path, dtype="float32")


def test_hash_sees_config_names_sizes_head_and_tail(tmp_path: Path) -> None:
    _write(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * (3 << 20))
    hashes = {model_hash(tmp_path)}
    for change in (b"b" + b"a" * ((3 << 20) - 1), b"a" * ((3 << 20) - 1) + b"b", b"a" * 7):
        weights.write_bytes(change)
        hashes.add(model_hash(tmp_path))
    weights.rename(tmp_path / "other.safetensors")
    hashes.add(model_hash(tmp_path))
    _write(tmp_path, hidden_size=96)
    hashes.add(model_hash(tmp_path))
    assert len(hashes) == 6
    assert model_hash(tmp_path) in hashes
