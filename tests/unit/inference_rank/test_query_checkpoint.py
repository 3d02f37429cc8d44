# SPDX-License-Identifier: Apache-2.0
"""``W_q`` from quantised files: exactly float64's product, rounded; all else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decided_args import decided_args
from quantised_models import Quantised, awq, compressed, fp8, fp8_channels, gptq
from safetensors.torch import load_file, save_file

from tandemkv.cache_rank.protocol.errors import ContractError, UnsupportedModelError
from tandemkv.cache_rank.protocol.models.architectures import ARCHITECTURES
from tandemkv.inference_rank.links.query_predictor import LiveQueryPredictor
from tandemkv.inference_rank.links.query_projection import QueryPlace, read_projection
from tandemkv.inference_rank.weights.query_checkpoint import QueryCheckpoint, checkpoint_of

HEADS, KV_HEADS, DIM, HIDDEN, LAYERS = 4, 2, 16, 96, 2
ROWS = HEADS * DIM
CPU = torch.device("cpu")
BLOCK = (24, 40)
"""Cut off at both ends, and no multiple of a rank's rows."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "hidden_size": HIDDEN,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
    "max_position_embeddings": 128, "vocab_size": 64, "intermediate_size": 64,
}  # fmt: skip
FP8 = {"quant_method": "fp8"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
}


def packed(**weights: Any) -> dict[str, Any]:
    group = {"weights": {"type": "int", "num_bits": 4, "group_size": 32, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": group},
    }


FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8-blocks": (lambda w: fp8(w, BLOCK), FP8 | {"weight_block_size": list(BLOCK)}),
    "fp8-tensor": (fp8, FP8),
    "fp8-modelopt": (fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fp8-channels": (fp8_channels, CHANNELS),
    "awq": (awq, AWQ),
    "awq-one-group": (lambda w: awq(w, HIDDEN), AWQ | {"group_size": HIDDEN}),
    "gptq": (gptq, GPTQ),
    "gptq-one-group": (lambda w: gptq(w, HIDDEN), GPTQ | {"group_size": -1}),
    "gptq-8-bits": (lambda w: gptq(w, bits=8), GPTQ | {"bits": 8}),
    "gptq-sorted": (
        lambda w: gptq(w, symmetric=False, sorted_columns=True),
        GPTQ | {"sym": False, "desc_act": True},
    ),
    "gptq-v2": (
        lambda w: gptq(w, symmetric=False, stored_less=0),
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "compressed": (compressed, packed(symmetric=True)),
    "compressed-8-bits": (lambda w: compressed(w, bits=8), packed(symmetric=True, num_bits=8)),
    "compressed-zeros": (lambda w: compressed(w, symmetric=False), packed(symmetric=False)),
}
every_format = pytest.mark.parametrize("kind", FORMATS)


def write(
    folder: Path, says: dict[str, Any] | None, parts: list[Quantised], prefix: str = "model."
) -> Path:
    config = CONFIG | ({} if says is None else {"quantization_config": says})
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        f"{prefix}layers.{layer}.self_attn.q_proj.{end}": tensor.contiguous()
        for layer, quantised in enumerate(parts)
        for end, tensor in quantised.parts.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def make(folder: Path, kind: str) -> list[Quantised]:
    torch.manual_seed(5)
    quantise, says = FORMATS[kind]
    found = [quantise(torch.randn(ROWS, HIDDEN) * 0.1) for _ in range(LAYERS)]
    write(folder, says, found)
    return found


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_float64_rounded(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """All rows, and those of each of two tensor-parallel ranks."""
    made = make(tmp_path, kind)
    checkpoint = QueryCheckpoint(tmp_path)
    checkpoint.check()
    for layer, (_, meaning) in enumerate(made):
        assert meaning.dtype == torch.float64
        assert float(meaning.abs().max()) > 0.1
        for rows in (range(ROWS), range(ROWS // 2), range(ROWS // 2, ROWS)):
            found = checkpoint.weight(layer, rows, dtype=dtype, device=CPU)
            assert found.is_contiguous()
            assert torch.equal(found, meaning[rows.start : rows.stop].to(dtype))


def test_what_is_not_quantised_is_taken_as_it_is(tmp_path: Path) -> None:
    """A format that is not known may be of other matrices alone."""
    other, plain = torch.randn(LAYERS, ROWS, HIDDEN).bfloat16()
    parts = [Quantised({"weight": weight.clone()}, weight) for weight in (other, plain)]
    write(tmp_path, {"quant_method": "mxfp4"}, parts)
    checkpoint = QueryCheckpoint(tmp_path)
    checkpoint.check()
    found = checkpoint.weight(1, range(DIM, ROWS), dtype=torch.float32, device=CPU)
    assert torch.equal(found, plain[DIM:].float())


class Layer(SimpleNamespace):
    """A decoder layer with a projection that SGLang has repacked."""


def repacked_model(bias: torch.Tensor | None = None, **projection: Any) -> Any:
    rotary = SimpleNamespace()
    packed = SimpleNamespace(quant_method=object(), bias=bias, **projection)
    layers = [
        Layer(
            input_layernorm=torch.nn.Identity(),
            self_attn=SimpleNamespace(qkv_proj=packed, rotary_emb=rotary),
        )
        for _ in range(LAYERS)
    ]
    model = type("LlamaForCausalLM", (), {})()
    model.model = SimpleNamespace(layers=layers)
    return model


def load(model: Any, checkpoint: QueryCheckpoint | None, heads: int = HEADS) -> LiveQueryPredictor:
    predictor = LiveQueryPredictor(
        model,
        QueryPlace(
            num_heads=heads, head_dim=DIM, device=CPU, dtype=torch.bfloat16, checkpoint=checkpoint
        ),
    )
    predictor.load()
    return predictor


@pytest.mark.parametrize("under_adapters", [False, True])
def test_each_rank_reads_its_rows_and_their_bias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, under_adapters: bool
) -> None:
    from sglang.srt import runtime_context

    made, bias = make(tmp_path, "gptq"), torch.randn(ROWS)
    for layer, quantised in enumerate(made):
        made[layer] = Quantised({**quantised.parts, "bias": bias + layer}, quantised.meaning)
    write(tmp_path, GPTQ, made)
    model = repacked_model(bias=torch.zeros(2 * ROWS), qweight=torch.zeros(1))
    if under_adapters:
        for layer in model.model.layers:
            wrapped = layer.self_attn.qkv_proj
            layer.self_attn.qkv_proj = SimpleNamespace(base_layer=wrapped, bias=wrapped.bias)
    for rank, num_ranks in ((0, 1), (0, 2), (1, 2)):
        place = SimpleNamespace(tp_rank=rank, tp_size=num_ranks)
        monkeypatch.setattr(runtime_context, "get_parallel", lambda place=place: place)
        predictor = load(model, QueryCheckpoint(tmp_path), HEADS // num_ranks)
        own = slice(rank * ROWS // num_ranks, (rank + 1) * ROWS // num_ranks)
        for layer, read in enumerate(predictor._layers):
            assert torch.equal(read.weight, made[layer].meaning[own].bfloat16())
            assert read.bias is not None
            assert torch.equal(read.bias, (bias + layer)[own].bfloat16())
    with pytest.raises(ContractError, match=r"2 ranks of 48 query rows are not the 64"):
        load(model, QueryCheckpoint(tmp_path), 3)


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration"])
def test_gates_are_left_out_and_linear_layers_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In FP8: rows of a head's query, then as many of its gate; layer 0 has no q."""
    from sglang.srt import runtime_context

    quantise, says = FORMATS["fp8-blocks"]
    both = quantise(torch.randn(2 * ROWS, HIDDEN) * 0.1)
    entry = ARCHITECTURES[name]
    write(tmp_path, says, [Quantised({}, both.meaning), both], entry.tensor_prefix)
    config: dict[str, Any] = CONFIG | {"full_attention_interval": 2}
    config = {entry.decoder_config: config} if entry.decoder_config else config
    config |= {"architectures": [name], "quantization_config": says}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = QueryCheckpoint(tmp_path)
    checkpoint.check()
    wanted = both.meaning.view(HEADS, 2, DIM, HIDDEN)[:, 0].flatten(0, 1)
    projection = SimpleNamespace(quant_method=object(), bias=None, qweight=torch.zeros(1))
    attention = SimpleNamespace(qkv_proj=projection, rotary_emb=None, attn_output_gate=True)
    for rank, num_ranks in ((0, 1), (0, 2), (1, 2)):
        group = SimpleNamespace(tp_rank=rank, tp_size=num_ranks)
        monkeypatch.setattr(runtime_context, "get_parallel", lambda group=group: group)
        place = QueryPlace(
            num_heads=HEADS // num_ranks, head_dim=DIM, device=CPU, dtype=torch.bfloat16,
            checkpoint=checkpoint,
        )  # fmt: skip
        weight, bias = read_projection("model, layer 1", 1, attention, place)
        own = slice(rank * ROWS // num_ranks, (rank + 1) * ROWS // num_ranks)
        assert torch.equal(weight, wanted[own].bfloat16())
        assert bias is None


def test_a_bias_that_the_files_lack_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "gptq")
    model = repacked_model(bias=torch.zeros(ROWS), qweight=torch.zeros(1))
    with pytest.raises(
        UnsupportedModelError, match=r"no model\.layers\.0\.self_attn\.q_proj\.bias"
    ):
        load(model, QueryCheckpoint(tmp_path))


def test_blocks_are_read_from_modules_if_no_files_were_loaded() -> None:
    """As after ``--load-format dummy``; the rows of q come first."""
    both = fp8(torch.randn(ROWS + 48, HIDDEN), BLOCK)
    weight, scale = both.parts["weight"], both.parts["weight_scale_inv"]
    method = SimpleNamespace(weight_block_size=list(BLOCK))
    model = repacked_model(weight=weight, weight_scale_inv=scale)
    model.model.layers[0].self_attn.qkv_proj.quant_method = method
    predictor = load(model, None)
    assert torch.equal(predictor._layers[1].weight, both.meaning[:ROWS].bfloat16())
    for changes in (
        {"weight": weight.view(torch.int8)},
        {"weight": None},
        {"weight_scale_inv": scale[:-1]},
        {"weight_scale_inv": scale.to(torch.float8_e4m3fn)},
        {"use_intel_amx_backend": True},
        {"quant_method": SimpleNamespace(weight_block_size=None)},
    ):
        kept = {"weight": weight, "weight_scale_inv": scale, "quant_method": method}
        projection = SimpleNamespace(**{**kept, "bias": None, **changes})
        for layer in model.model.layers:
            layer.self_attn.qkv_proj = projection
        with pytest.raises(ContractError, match=r"(is quantised|has repacked).*--policy exact"):
            load(model, None)


def test_a_runner_says_which_files(tmp_path: Path) -> None:
    model = SimpleNamespace(model_path=str(tmp_path))
    for load_format, has_files in (("auto", True), ("safetensors", True), ("dummy", False)):
        arguments = SimpleNamespace(load_format=load_format)
        runner = SimpleNamespace(server_args=arguments, model_config=model)
        assert (checkpoint_of(runner) is not None) == has_files
    runner = SimpleNamespace(server_args=decided_args(load_format="dummy"), model_config=model)
    assert checkpoint_of(runner) is None, "SGLang has decided that itself"


@pytest.mark.parametrize(
    ("kind", "says", "match"),
    [
        ("fp8-tensor", None, r"quantisation=none.*no quantization_config"),
        ("fp8-tensor", {"quant_method": "mxfp8"}, r"quantisation=mxfp8.*exponents are not read"),
        ("fp8-tensor", {"quant_method": "fbgemm_fp8"}, r"SGLang 0\.5\.17 does not run it"),
        ("fp8-tensor", {"quant_method": "w8a8_int8"}, r"int8 matrices are not read"),
        ("fp8-tensor", {"quant_method": "newest"}, r"newest.*does not know the format"),
        ("fp8-tensor", FP8 | {"fmt": "e5m2"}, r"fmt=e5m2 is another float"),
        ("fp8-tensor", FP8 | {"weight_block_size": [0, 1]}, r"garbles a field.*blocks of"),
        ("fp8-tensor", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"FP8 alone is read"),
        ("fp8-tensor", {"quant_method": "compressed-tensors"}, r"garbles a field.*config_groups"),
        ("fp8-tensor", GPTQ, r"q_proj\.weight \(F8_E4M3\).*another layout"),
        ("gptq", GPTQ | {"bits": 3}, r"3 bits, not 4 or 8"),
        ("gptq", GPTQ | {"checkpoint_format": "marlin"}, r"checkpoint_format=marlin"),
        ("gptq", GPTQ | {"is_marlin_format": True}, r"checkpoint_format=marlin"),
        ("compressed", packed(num_bits=3), r"it has int3"),
        ("compressed", packed() | {"format": "int-quantized"}, r"it has int4"),
        ("compressed", GPTQ, r"q_proj\.weight_packed \(I32\).*another layout"),
        ("compressed", packed(symmetric=False), r"no weight_zero_point beside it"),
        ("gptq", FP8, r"q_proj\.qweight \(I32\).*another layout"),
        ("awq", AWQ | {"version": "gemv"}, r"version=gemv"),
        ("awq", AWQ | {"bits": 8}, r"8 bits, not 4"),
    ],
)  # fmt: skip
def test_other_formats_are_refused_by_name(
    tmp_path: Path, kind: str, says: dict[str, Any] | None, match: str
) -> None:
    write(tmp_path, says, make(tmp_path, kind))
    checkpoint = QueryCheckpoint(tmp_path)
    for refuse in (
        checkpoint.check,
        lambda: checkpoint.weight(0, range(ROWS), dtype=torch.float32, device=CPU),
    ):
        with pytest.raises(UnsupportedModelError, match=match) as refusal:
            refuse()
        assert "--policy exact" in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "end", "match"),
    [
        ("fp8-blocks", "weight_scale_inv", r"weight_scale_inv has shape \[3, 2\].*\[3, 3\]"),
        ("fp8-channels", "weight_scale", r"weight_scale has shape \[64, 0\]"),
        ("gptq", "g_idx", r"g_idx has shape \[95\].*\[96\]"),
        ("gptq", "scales", r"scales has shape \[3, 63\].*\[3, 64\]"),
        ("gptq", "qzeros", r"qzeros has shape \[3, 7\].*\[3, 8\]"),
        ("awq", "qzeros", r"qzeros has shape \[3, 7\].*\[3, 8\]"),
        ("compressed", "weight_packed", r"weight_packed .*is not of 4 or 8 bits|has shape"),
        ("compressed-zeros", "weight_zero_point", r"zero_point has shape \[8, 2\].*\[8, 3\]"),
    ],
)
def test_shapes_are_checked_in_the_headers(tmp_path: Path, kind: str, end: str, match: str) -> None:
    made = make(tmp_path, kind)
    parts = made[1].parts
    made[1] = Quantised({**parts, end: parts[end][..., :-1]}, made[1].meaning)
    write(tmp_path, FORMATS[kind][1], made)
    with pytest.raises(UnsupportedModelError, match=match):
        QueryCheckpoint(tmp_path).check()


@pytest.mark.parametrize(
    ("kind", "ends", "match"),
    [
        ("fp8-tensor", ["weight_scale"], r"no weight_scale_inv or weight_scale beside it"),
        ("awq", ["qzeros", "scales"], r"no scales, qzeros beside it"),
        ("gptq", ["qweight", "qzeros", "scales", "g_idx"], r"no tensor model\.layers\.1\."),
    ],
)
def test_tensors_that_are_missing_are_named(
    tmp_path: Path, kind: str, ends: list[str], match: str
) -> None:
    made = make(tmp_path, kind)
    parts = {end: part for end, part in made[1].parts.items() if end not in ends}
    made[1] = Quantised(parts, made[1].meaning)
    write(tmp_path, FORMATS[kind][1], made)
    with pytest.raises(UnsupportedModelError, match=match):
        QueryCheckpoint(tmp_path).check()


def test_groups_beyond_the_scales_are_refused(tmp_path: Path) -> None:
    made = make(tmp_path, "gptq")
    made[0].parts["g_idx"][5] = 3
    write(tmp_path, GPTQ, made)
    with pytest.raises(UnsupportedModelError, match=r"g_idx names groups beyond its 3"):
        QueryCheckpoint(tmp_path).weight(0, range(ROWS), dtype=torch.float32, device=CPU)


def test_only_files_of_the_index_are_read(tmp_path: Path) -> None:
    made = make(tmp_path, "awq")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "first.safetensors")
    save_file({next(iter(tensors)): torch.zeros(1)}, tmp_path / "zzz-older.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "first.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = QueryCheckpoint(tmp_path).weight(0, range(ROWS), dtype=torch.float32, device=CPU)
    assert torch.equal(found, made[0].meaning.float())
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UnsupportedModelError, match=r"index\.json: cannot be read"):
        QueryCheckpoint(tmp_path).check()


def test_the_tests_pack_as_sglang_and_compressed_tensors_do() -> None:
    """What is unpacked above was packed by this repository; these are others' definitions."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from sglang.srt.layers.quantization.utils import pack_cols, pack_rows, unpack_cols

    torch.manual_seed(2)
    matrix = torch.randn(ROWS, HIDDEN)
    found = gptq(matrix, symmetric=False)
    scales = found.parts["scales"].double()[torch.arange(HIDDEN) // 32].T
    zeros = unpack_cols(found.parts["qzeros"], 4, HIDDEN // 32, ROWS) + 1
    codes = (found.meaning / scales).round() + zeros[torch.arange(HIDDEN) // 32].T
    assert torch.equal(found.parts["qweight"], pack_rows(codes.T.int(), 4, HIDDEN, ROWS))
    assert torch.equal(found.parts["qzeros"], pack_cols(zeros.int() - 1, 4, HIDDEN // 32, ROWS))
    # SGLang undoes AWQ's order in `awq_to_marlin_zero_points` by this sort of each word.
    found, order = awq(matrix), torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]).argsort()
    names = {"qzeros": HIDDEN // 32, "qweight": HIDDEN}
    zeros, codes = (
        unpack_cols(found.parts[name], 4, size, ROWS).view(-1, 8)[:, order].view(size, ROWS)
        for name, size in names.items()
    )
    scales = found.parts["scales"].double()[torch.arange(HIDDEN) // 32]
    assert torch.equal(((codes - zeros[torch.arange(HIDDEN) // 32]) * scales).T, found.meaning)
    found = compressed(matrix)
    codes = (found.meaning / found.parts["weight_scale"].double().repeat_interleave(32, 1)).round()
    assert torch.equal(found.parts["weight_packed"], pack_to_int32(codes.to(torch.int8), 4))


def test_ranks_that_split_a_word_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "awq")
    with pytest.raises(UnsupportedModelError, match=r"rows 4 to 20 are no whole words of 8"):
        QueryCheckpoint(tmp_path).weight(0, range(4, 20), dtype=torch.float32, device=CPU)
