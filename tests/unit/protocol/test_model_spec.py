# SPDX-License-Identifier: Apache-2.0
"""A model directory is read completely or refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandemkv.cache_rank.protocol.errors import UnsupportedModelError
from tandemkv.cache_rank.protocol.models.model_spec import (
    ModelSpec,
    model_hash,
    read_config,
    read_model_spec,
)

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


def test_granite_has_a_softmax_scale_of_its_own(tmp_path: Path) -> None:
    changes = {"architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.015625}
    spec = read_model_spec(_write(tmp_path, **changes), dtype="float32")
    assert spec.scale == 0.015625
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 256},  # of Qwen 2 it counts only with use_sliding_window
        {"sliding_window": 256, "use_sliding_window": False},
        {"architectures": ["Phi3ForCausalLM"], "sliding_window": 512},  # as long as the context
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"attn_type_list": [1, 1, 1], "attn_logit_softcapping": None},
        {"rope_scaling": {"type": "yarn", "factor": 2}},
    ],
)
def test_fields_that_change_nothing(tmp_path: Path, changes: dict[str, object]) -> None:
    assert read_model_spec(_write(tmp_path, **changes), dtype="float32").num_layers == 3


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
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 256}, "sliding-window"),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 256}, "sliding-window"),
        ({"architectures": ["Gemma2ForCausalLM"]}, r"caps its attention.*docs/models\.md"),
        ({"architectures": ["GlmForCausalLM"]}, r"not in the list.*docs/models\.md"),
        ({"architectures": "Qwen2ForCausalLM"}, "unknown"),
        ({"layer_types": ["linear_attention"]}, "linear_attention are not supported"),
        ({"attn_type_list": [1, 0, 1]}, "linear_attention are not supported"),
        ({"attn_logit_softcapping": 30.0}, r"capped \(attn_logit_softcapping\)"),
        ({"dual_chunk_attention_config": {"chunk_size": 64}}, "chunks of a long context"),
        ({"kv_lora_rank": 64}, "MLA"),
        ({"attention_multiplier": 0.5}, "attention_multiplier=0.5 is another softmax scale"),
        ({"query_pre_attn_scalar": 256}, "another softmax scale"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope_type=longrope"),
        ({"architectures": ["GraniteForCausalLM"]}, "garbles.*attention_multiplier"),
        (
            {"architectures": ["GraniteForCausalLM"], "attention_multiplier": 0},
            "garbles.*attention_multiplier=0.0 must be above 0",
        ),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": "many"}, "garbles"),
        ({"num_attention_heads": 0}, "garbles"),
        ({"layer_types": 3}, "garbles"),
        ({"attn_type_list": True}, "garbles"),
        (
            {"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 1 << 70},
            "garbles.*num_hidden_layers=1180591620717411303424 must be 4096 at most",
        ),
        ({"max_position_embeddings": 1 << 25}, "garbles.*<= 16777216"),
        ({"num_key_value_heads": 4}, "must be a multiple"),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        read_model_spec(_write(tmp_path, **changes), dtype="float32")


GEMMA = {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 256, "sliding_window": 64}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "sliding_window": 64}


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({**GEMMA, "num_hidden_layers": 7}, (0, 1, 2, 3, 4, 6)),  # each sixth has none
        ({**GEMMA, "sliding_window_pattern": 3}, (0, 1)),
        ({**GEMMA, "layer_types": ["full_attention", "sliding_attention"] * 2}, (1,)),
        (GPT_OSS, (0, 2)),
        ({**GPT_OSS, "layer_types": ["full_attention"] * 3}, ()),
    ],
)
def test_layers_with_a_window_are_named(
    tmp_path: Path, changes: dict[str, object], windowed: tuple[int, ...]
) -> None:
    spec = read_model_spec(_write(tmp_path, **changes), dtype="float32")
    assert spec.windowed_layers == windowed
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec


NEXT = {"architectures": ["Qwen3NextForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "linear"),
    [
        ({**NEXT, "num_hidden_layers": 5}, (0, 1, 2, 4)),  # each fourth has K and V
        ({**NEXT, "full_attention_interval": 2}, (0, 2)),
        ({**NEXT, "layer_types": ["full_attention"] + ["linear_attention"] * 2}, (1, 2)),
    ],
)
def test_layers_of_linear_attention_are_named(
    tmp_path: Path, changes: dict[str, object], linear: tuple[int, ...]
) -> None:
    spec = read_model_spec(_write(tmp_path, **changes), dtype="float32")
    assert (spec.linear_layers, spec.windowed_layers) == (linear, ())
    assert spec.other_layers == linear
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, "sliding-window attention"),
        ({"layer_types": ["linear_attention"] * 3}, "no layer attends to the whole context"),
        ({"num_hidden_layers": 3}, "no layer attends to the whole context"),
    ],
)
def test_models_of_linear_attention_alone_are_refused(
    tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        read_model_spec(_write(tmp_path, **NEXT, **changes), dtype="float32")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """Reading a FIFO would wait for ever."""
    os.mkfifo(_write(tmp_path) / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors.*\(not a regular file\)"):
        read_model_spec(tmp_path, dtype="float32")
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UnsupportedModelError, match=r"config\.json \(.*not a regular file\)"):
        read_config(tmp_path)


NESTED = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": True,
    "quantization_config": {"quant_method": "fp8"}, "vision_config": {"hidden_size": 7},
    "hidden_size": 7, "dtype": "float16",
}  # fmt: skip


def test_the_decoder_may_have_a_configuration_of_its_own(tmp_path: Path) -> None:
    """What it says goes before what stands beside it, but for what concerns the whole model."""
    text = {
        **CONFIG,
        "full_attention_interval": 3,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    text |= {"architectures": ["Other"], "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(NESTED | {"text_config": text}))
    spec = read_model_spec(tmp_path, dtype="float32")
    assert (spec.architecture, spec.hidden_size) == ("Qwen3_5ForConditionalGeneration", 48)
    assert spec.linear_layers == (0, 1)
    config = read_config(tmp_path)
    assert config["tie_word_embeddings"] is True
    assert config["quantization_config"] == {"quant_method": "fp8"}
    assert config["dtype"] == "bfloat16"
    del text["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(NESTED | {"text_config": text}))
    with pytest.raises(UnsupportedModelError, match=r"garbles.*num_hidden_layers"):
        read_model_spec(tmp_path, dtype="float32")


def test_embeddings_are_tied_where_the_whole_model_says_so(tmp_path: Path) -> None:
    """SGLang and transformers do not ask the decoder's configuration."""
    whole = {name: x for name, x in NESTED.items() if name != "tie_word_embeddings"}
    text = CONFIG | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    assert "tie_word_embeddings" not in read_config(tmp_path)


@pytest.mark.parametrize("text", [None, [], "x"])
def test_a_decoder_without_a_configuration_is_refused(tmp_path: Path, text: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | NESTED | {"text_config": text}))
    with pytest.raises(UnsupportedModelError, match="has no object text_config; copy or download"):
        read_config(tmp_path)


def test_a_configuration_that_no_decoder_has_is_left_alone(tmp_path: Path) -> None:
    assert read_config(_write(tmp_path, text_config={"hidden_size": 7}))["hidden_size"] == 48


def test_gemma_scales_by_a_field_of_its_own(tmp_path: Path) -> None:
    changes = {**GEMMA, "sliding_window_pattern": 3}
    assert read_model_spec(_write(tmp_path, **changes), dtype="float32").scale == 256**-0.5


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layer_types": ["sliding_attention"] * 3}, "no layer attends to the whole context"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"layer_types": ["full_attention"] * 2 + ["chunked_attention"]}, "chunked_attention"),
        ({"use_bidirectional_attention": True}, "attend to later ones"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8}}, "rope_type=linear.*no scaling"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
            "rope_type=linear.*no scaling",
        ),
    ],
)
def test_hybrids_that_cannot_be_served(
    tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        read_model_spec(_write(tmp_path, **GEMMA, **changes), dtype="float32")


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
