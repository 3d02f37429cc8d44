# SPDX-License-Identifier: Apache-2.0
"""Quantised models before a start: refused by name where queries are predicted, else counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import CONFIG, write_model

from tandemkv.cache_rank.protocol.errors import SettingsError, UnsupportedModelError
from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec
from tandemkv.cache_rank.protocol.models.weight_formats import format_of, read_weight_format
from tandemkv.server.checks.preflight import ResolvedLaunch, resolve_launch
from tandemkv.server.plan.footprint import memory_of
from tandemkv.server.plan.memory import estimate_memory
from tandemkv.server.plan.placement import Placement, PlacementKind
from tandemkv.server.plan.shape import find_shape
from tandemkv.server.plan.workload import Workload
from tandemkv.server.settings.launch_settings import ServeSettings

BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
UNKNOWN = {"quant_method": "mxfp8"}
OTHERS = ["exact", "streaming", "last_query", "quest", "oracle"]


def write_float8(path: Path, says: dict[str, Any]) -> Path:
    """Write a model with q in float8, and a scale for each block of 32 by 32."""
    write_model(path, CONFIG | {"quantization_config": says})
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(rows // 32, columns // 32)
    save_file(tensors, file)
    return path


def resolve(model_dir: Path, policy: str = "look_ahead", *sglang_args: str) -> ResolvedLaunch:
    settings = ServeSettings.model_validate(
        {
            "model": str(model_dir), "port": 0, "device": "cpu",
            "selection": {"policy": policy}, "sglang_args": sglang_args,
        }
    )  # fmt: skip
    return resolve_launch(settings, lambda _: None)


def test_a_format_that_is_read_starts(tmp_path: Path) -> None:
    resolve(write_float8(tmp_path, BLOCKS))
    resolve(tmp_path, "look_ahead", "--load-format", "dummy")


@pytest.mark.parametrize("says", [UNKNOWN, {"quant_method": "fp8"}, {"quant_method": "newest"}])
def test_others_are_refused_where_queries_are_predicted(
    tmp_path: Path, says: dict[str, Any]
) -> None:
    write_float8(tmp_path, says)
    with pytest.raises(UnsupportedModelError) as refusal:
        resolve(tmp_path)
    assert str(tmp_path.name) in str(refusal.value)
    for policy in OTHERS:
        resolve(tmp_path, policy)


def test_a_refusal_says_the_name_the_reason_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"quantisation=mxfp8.*exponents are not read; serve with a policy.*--policy exact",
    ):
        resolve(write_float8(tmp_path, UNKNOWN))


def test_weights_that_sglang_does_not_read_from_files_are_refused(tmp_path: Path) -> None:
    write_float8(tmp_path, BLOCKS)
    with pytest.raises(UnsupportedModelError, match=r"--load-format sharded_state.*from safetens"):
        resolve(tmp_path, "look_ahead", "--load-format", "sharded_state")
    write_float8(tmp_path, {"quant_method": "fp8"})
    with pytest.raises(UnsupportedModelError, match=r"quantisation=fp8, --load-format dummy"):
        resolve(tmp_path, "look_ahead", "--load-format", "dummy")
    resolve(tmp_path, "exact", "--load-format", "dummy")


def test_torchao_is_refused_where_queries_are_predicted(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(SettingsError, match=r"--torchao-config.*policy=look_ahead.*drop it"):
        resolve(tmp_path, "look_ahead", "--torchao-config", "int8wo")
    resolve(tmp_path, "exact", "--torchao-config", "int8wo")
    resolve(tmp_path, "look_ahead", "--quantization", "fp8")


def test_modelopt_has_a_file_of_its_own(tmp_path: Path) -> None:
    assert read_weight_format(tmp_path, CONFIG) is None
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    found = read_weight_format(tmp_path, CONFIG)
    assert found is not None
    assert (found.method, found.packing, found.reason) == ("modelopt FP8", "fp8", "")
    path.write_text("{")
    found = read_weight_format(tmp_path, CONFIG)
    assert found is not None
    assert found.reason.startswith("the file cannot be read")


@pytest.mark.parametrize(
    ("says", "bits"),
    [
        (BLOCKS, 8.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8.0),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "mxfp8"}, 8.25),
        ({"quant_method": "modelopt_fp4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
    ],
)
def test_the_plan_counts_smaller_matrices_and_w_q_once_more(
    tmp_path: Path, says: dict[str, Any], bits: float
) -> None:
    """Qwen3-8B: 6.95 billion parameters in layers, 1.24 in two tables; W_q is 0.6 billion."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": says}))
    shape = find_shape(str(tmp_path))
    layers = plain.weight_bytes // 2 - 2 * 151936 * 4096 - 4096
    assert plain.weight_bytes - shape.weight_bytes == round(layers * 2) - round(layers * bits / 8)
    assert plain.step_weight_bytes(8) - shape.step_weight_bytes(8) == pytest.approx(
        layers * (2 - bits / 8), abs=1
    )
    load = Workload(context_tokens=65536, concurrency=8, num_resident=2052)
    for kind, caches in ((PlacementKind.IN_PROCESS, 0), (PlacementKind.SEPARATE, 1)):
        placement = Placement(kind=kind, tp_size=1, num_cache_gpus=caches)
        found = memory_of(placement, shape, load).inference
        assert found.weights == shape.weight_bytes
        assert found.predictor == 36 * 4096 * (4096 + 1) * 2
        exact = Workload(context_tokens=65536, concurrency=8, num_resident=4, predicts=False)
        for form, asked in ((shape, exact), (plain, load)):
            found = memory_of(placement, form, asked).inference
            assert (found.weights, found.predictor) == (form.weight_bytes, 0)


@pytest.mark.parametrize(("layers", "experts", "size"), [(24, 32, 13.76e9), (36, 128, 65.25e9)])
def test_what_a_checkpoint_does_not_quantise_is_counted_as_it_is(
    tmp_path: Path, layers: int, experts: int, size: float
) -> None:
    """The shapes of gpt-oss 20b and 120b, and the bytes of their files."""
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    config = {
        "architectures": ["GptOssForCausalLM"], "num_hidden_layers": layers, "hidden_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 2880, "vocab_size": 201088, "num_local_experts": experts,
        "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
    }  # fmt: skip
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    shape = find_shape(str(tmp_path))
    assert shape.weight_bytes == pytest.approx(size, rel=0.01)
    # W_q is SGLang's own: nothing is dequantised.
    load = Workload(context_tokens=65536, concurrency=8, num_resident=2052)
    placement = Placement(kind=PlacementKind.IN_PROCESS, tp_size=1)
    assert memory_of(placement, shape, load).inference.predictor == 0
    spec = read_model_spec(tmp_path, dtype="bfloat16")
    settings = ServeSettings.model_validate({"model": str(tmp_path)})
    assert estimate_memory(settings, spec, tmp_path, device="cpu").predictor == 0


@pytest.mark.parametrize(
    ("says", "module", "converts"),
    [
        ({"modules_to_not_convert": ["model.layers.*.self_attn"]}, "3.self_attn.q_proj", False),
        ({"modules_to_not_convert": ["model.layers.1"]}, "10.self_attn.q_proj", True),
        ({"ignored_layers": ["model.layers.1.self_attn"]}, "1.self_attn.q_proj", False),
        ({"ignore": ["re:.*self_attn.*", "lm_head"]}, "0.self_attn.q_proj", False),
        ({"exclude_modules": ["model.layers.0.self_attn*"]}, "0.self_attn.q_proj", False),
        ({"exclude_modules": ["model.layers.0.self_attn*"]}, "0.mlp.up_proj", True),
        ({"modules_to_not_convert": ["gate"]}, "0.mlp.gate_proj", True),
        ({"modules_to_not_convert": "self_attn"}, "0.self_attn.q_proj", True),
    ],
)
def test_modules_that_are_not_quantised(says: dict[str, Any], module: str, converts: bool) -> None:
    found = format_of({"quantization_config": {"quant_method": "fp8"} | says})
    assert found is not None
    assert found.converts(f"model.layers.{module}") is converts


def test_infinite_bits_are_told_of() -> None:
    found = format_of({"quantization_config": {"quant_method": "gptq", "bits": float("inf")}})
    assert found is not None
    assert "garbles a field (OverflowError" in found.reason


def test_an_expression_that_is_none_is_told_of() -> None:
    found = format_of({"quantization_config": {"quant_method": "fp8", "ignore": ["re:("]}})
    assert found is not None
    assert "garbles a field (error: missing )" in found.reason
    assert found.converts("model.layers.0.self_attn.q_proj")


def test_host_memory_has_w_q_where_it_is_held_once_more(tmp_path: Path) -> None:
    write_float8(tmp_path, BLOCKS)
    spec = read_model_spec(tmp_path, dtype="bfloat16")

    def bytes_of(policy: str) -> int:
        settings = ServeSettings.model_validate(
            {"model": str(tmp_path), "selection": {"policy": policy}}
        )
        needed = estimate_memory(settings, spec, tmp_path, device="cpu")
        assert ("predictor" in needed.describe()) == (needed.predictor > 0)
        return needed.predictor

    assert bytes_of("look_ahead") == 4 * 64 * 64 * 2
    assert bytes_of("exact") == 0
    write_model(tmp_path)
    assert bytes_of("look_ahead") == 0


def test_formats_that_are_damaged_have_a_reason() -> None:
    for says in ("fp8", ["fp8"], {"quant_method": "gptq"}, {"quant_method": "awq", "bits": "x"}):
        found = format_of({"quantization_config": says})
        assert found is not None
        assert found.packing == "unknown"
        assert found.reason
