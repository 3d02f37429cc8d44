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
        ({"quant_method": "mxfp4"}, 4.0),
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
