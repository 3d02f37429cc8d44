# SPDX-License-Identifier: Apache-2.0
"""Memory by hand, and that it never shrinks when the load grows."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandemkv.cache_rank.protocol.errors import SettingsError, UnsupportedModelError
from tandemkv.cache_rank.protocol.settings.declared import DeclaredPolicy
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.mirror import make_mirror_scratch
from tandemkv.kernels.select import make_select_scratch
from tandemkv.server.plan.footprint import (
    activation_bytes,
    index_bytes,
    memory_of,
    scratch_bytes,
)
from tandemkv.server.plan.placement import Placement, PlacementKind, possible_placements
from tandemkv.server.plan.shape import (
    BUILT_IN_CONFIGS,
    LinearShape,
    ModelShape,
    find_shape,
    shape_of_config,
)
from tandemkv.server.plan.workload import Workload

QWEN = find_shape("qwen3-8b")
TINY = ModelShape(
    name="tiny", num_layers=2, hidden_size=8, num_qo_heads=4, num_kv_heads=2, head_dim=4,
    intermediate_size=16, vocab_size=10,
)  # fmt: skip
LOAD = Workload(
    context_tokens=100, concurrency=3, num_resident=20, num_recent_tokens=5, fetch_cap_tokens=2,
    chunk_tokens=50,
)  # fmt: skip
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip


def test_tiny_model_by_hand() -> None:
    # q, o: 8 x 16 each; k, v: 8 x 8 each; three 8 x 16; two norms of 8
    layer = 2 * 128 + 2 * 64 + 3 * 128 + 16
    assert TINY.weight_bytes == 2 * (2 * layer + 2 * 80 + 8)
    assert replace(TINY, tied_embeddings=True).weight_bytes == 2 * (2 * layer + 80 + 8)
    assert TINY.step_weight_bytes(4) == 2 * (2 * layer + 80)
    assert TINY.predictor_bytes == 2 * (2 * 8 * 17)
    assert TINY.predictor_copy_bytes("native") == TINY.predictor_bytes
    assert TINY.predictor_copy_bytes("int8") == 2 * (16 * (8 + 4) + 2 * 8)
    assert TINY.kv_token_bytes == 2 * 2 * 2 * 4 * 2  # layers x (K, V) x heads x dim x bf16


def test_fp8_halves_k_and_v_alone() -> None:
    eight = QWEN.with_kv_dtype("fp8_e4m3")
    assert 2 * eight.kv_token_bytes == QWEN.kv_token_bytes
    assert eight.weight_bytes == QWEN.weight_bytes
    assert QWEN.with_kv_dtype("auto") == QWEN
    native = replace(LOAD, index_dtype="native")
    assert native.index_head_token_bytes(eight) == 128
    assert native.index_head_token_bytes(QWEN) == 256


def test_only_full_layers_have_sets_and_an_index() -> None:
    hybrid = replace(TINY, num_layers=6, windowed_layers=(0, 1, 3, 5), window=8)
    full = replace(TINY, num_layers=2)
    placement = Placement(kind=PlacementKind.IN_PROCESS, tp_size=1)
    found, other = (memory_of(placement, x, LOAD).inference for x in (hybrid, full))
    assert found.resident_set == other.resident_set
    assert found.key_index == other.key_index
    assert found.kv == 3 * other.kv  # SGLang keeps all tokens of all layers
    assert hybrid.predictor_copy_bytes("int8") == full.predictor_copy_bytes("int8")


LINEAR = LinearShape(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=8, kernel=3)


def test_layers_of_linear_attention_have_states() -> None:
    hybrid = replace(
        TINY, num_layers=6, linear_layers=(0, 1, 3, 5), linear=LINEAR, gates_heads=True
    )
    full = replace(TINY, gates_heads=True)
    placement = Placement(kind=PlacementKind.IN_PROCESS, tp_size=1)
    found, other = (memory_of(placement, x, LOAD).inference for x in (hybrid, full))
    assert (found.resident_set, found.key_index) == (other.resident_set, other.key_index)
    assert found.kv == other.kv
    # 2 x 8 x 4 float32 and two tokens of 4 + 4 + 16 bfloat16, five for each of three and padding.
    assert found.states == 4 * (256 + 96) * (5 * 3 + 1)
    assert other.states == 0
    # qkv and z 24 + 16, b and a 4, convolution 3 x 24, two of 2, 8, out 16, MLP and norms
    linear = 8 * (40 + 4) + 72 + 4 + 8 + 8 * 16 + 3 * 128 + 16
    gate = 8 * 16
    assert hybrid.weight_bytes == full.weight_bytes + 2 * 4 * linear
    assert full.weight_bytes == TINY.weight_bytes + 2 * 2 * gate
    assert found.weights == hybrid.weight_bytes
    assert found.predictor == hybrid.predictor_bytes  # without gates
    assert hybrid.predictor_bytes == TINY.predictor_bytes


def test_what_reads_images_is_held_and_read_by_no_step() -> None:
    seeing = replace(TINY, vision_parameters=1000)
    assert seeing.weight_bytes == TINY.weight_bytes + 2 * 1000
    quantised = replace(seeing, matrix_bits=8.0)  # of the layers alone
    assert quantised.weight_bytes == replace(TINY, matrix_bits=8.0).weight_bytes + 2 * 1000
    assert seeing.step_weight_bytes(3) == TINY.step_weight_bytes(3)


QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "hidden_size": 1024, "head_dim": 256,
    "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 3584, "vocab_size": 248320, "max_position_embeddings": 262144,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
    "vision_config": {
        "depth": 12, "hidden_size": 768, "intermediate_size": 3072, "in_channels": 3,
        "patch_size": 16, "temporal_patch_size": 2, "num_position_embeddings": 2304,
        "spatial_merge_size": 2, "out_hidden_size": 1024,
    },
}  # fmt: skip


def test_qwen3_5_has_what_reads_images() -> None:
    """The transformer of patches by hand: patches, positions, blocks and what merges four."""
    shape = shape_of_config(QWEN3_5, name="m", dtype="bfloat16")
    block = 768 * 2304 + 2304 + 768 * 768 + 768 + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    merger = 3072 * 3072 + 3072 + 3072 * 1024 + 1024 + 2 * 768
    patches = 768 * (3 * 2 * 16 * 16) + 768 + 2304 * 768
    assert shape.vision_parameters == patches + 12 * block + merger
    lacking = {name: x for name, x in QWEN3_5.items() if name != "vision_config"}
    with pytest.raises(UnsupportedModelError, match="vision_config"):
        shape_of_config(lacking, name="m", dtype="bfloat16")
    text = shape_of_config(
        lacking | {"architectures": ["Qwen3_5ForCausalLM"]}, name="m", dtype="bfloat16"
    )
    assert shape.weight_bytes == text.weight_bytes + 2 * shape.vision_parameters
    assert text.vision_parameters == 0


@pytest.mark.parametrize(
    ("architecture", "field"),
    [("Qwen3ForCausalLM", "intermediate_size"), ("Qwen3_5ForCausalLM", "linear_key_head_dim")],
)
def test_infinite_sizes_are_refused(architecture: str, field: str) -> None:
    config = {**QWEN3_5, "architectures": [architecture], field: math.inf}
    with pytest.raises(UnsupportedModelError, match=r"garbles a field.*infinity"):
        shape_of_config(config, name="m", dtype="bfloat16")


def test_other_layers_attend_where_the_model_is() -> None:
    for others in ({"windowed_layers": (0,)}, {"linear_layers": (0,)}):
        hybrid = replace(TINY, **others)
        kinds = {x.kind for x in possible_placements(hybrid, 2)}
        assert kinds == {PlacementKind.DENSE, PlacementKind.IN_PROCESS}


def test_windows_are_read_from_the_configuration() -> None:
    config = {**CONFIG, "architectures": ["GptOssForCausalLM"], "sliding_window": 128,
              "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
    shape = shape_of_config(config, name="m", dtype="bfloat16")
    assert shape.windowed_layers == tuple(range(0, 36, 2))
    assert (shape.window, shape.num_full_layers) == (128, 18)
    plain = shape_of_config({**CONFIG, "sliding_window": 128}, name="m", dtype="bfloat16")
    assert (plain.windowed_layers, plain.window) == ((), 0)


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.53), ("llama-3.1-8b", 8.03)]
)
def test_built_in_shapes_have_the_published_parameter_counts(name: str, billions: float) -> None:
    assert find_shape(name).weight_bytes / 2 == pytest.approx(billions * 1e9, rel=2e-3)


def test_separate_ranks_by_hand() -> None:
    placement = Placement(kind=PlacementKind.SEPARATE, tp_size=1, num_cache_gpus=2)
    memory = memory_of(placement, TINY, LOAD)
    assert memory.inference.resident_set == 4 * 25 * 64  # one padding row
    assert memory.inference.kv == memory.inference.key_index == 0
    assert memory.inference.books == 0
    assert memory.inference.staging == 2 * 100 * 32  # of two layers
    assert (memory.inference.weights, memory.inference.predictor) == (TINY.weight_bytes, 0)
    assert memory.cache is not None
    assert memory.cache.kv == 300 * 64 // 2
    assert memory.cache.key_index == 300 * 2 * 2 * (4 + 4) // 2
    # Two lanes, 300 tokens, two heads: two float16, two pairs of float32 for 16 tokens, two bits.
    assert memory.cache.selection_scratch == 2 * 300 * 2 * (4 + 1 + 1 / 4) // 2
    assert memory.inference.selection_scratch == 0
    assert memory.cache.predictor == -(-TINY.predictor_copy_bytes("int8") // 2)
    for limit, longest in ((250, 250), (1000, 300)):  # no request is longer than all K/V
        longer = memory_of(placement, TINY, replace(LOAD, max_context=limit))
        assert longer.inference.staging == 2 * longest * 32
    one = memory_of(replace(placement, num_cache_gpus=1), TINY, LOAD).cache
    assert one is not None
    assert one.predictor == TINY.predictor_copy_bytes("int8")
    # Streams of 8 and two of four heads' queries, of two layers; two layers' prompt queries.
    assert memory.cache.staging == (2 * 3 * (8 + 8) + 2 * 3 * 64 * 8) * 2
    # Position and use of 20 slots of a head, of four rows; and two versions.
    assert memory.cache.books == 3 * 2 * 4 * (2 * 4 * 2 * 20) // 2
    idle = memory_of(placement, TINY, replace(LOAD, selects=False)).cache
    assert idle is not None
    assert idle.books == 0


def test_the_fullest_of_several_cache_gpus_counts() -> None:
    """K/V are divided by layers, 36 over 5, and all else by the 8 heads."""
    five = Placement(kind=PlacementKind.SEPARATE, tp_size=1, num_cache_gpus=5)
    memory, one = (
        memory_of(replace(five, num_cache_gpus=count), QWEN, LOAD).cache for count in (5, 1)
    )
    assert memory is not None
    assert one is not None
    assert memory.kv == one.kv * 8 // 36
    assert memory.key_index == one.key_index * 2 // 8
    assert memory.books == one.books * 2 // 8
    assert (
        memory_of(five, QWEN, LOAD).inference
        == memory_of(replace(five, num_cache_gpus=1), QWEN, LOAD).inference
    )


def test_in_process_keeps_everything_on_the_inference_gpus() -> None:
    memory = memory_of(Placement(kind=PlacementKind.IN_PROCESS, tp_size=2), TINY, LOAD)
    assert memory.cache is None
    assert memory.inference.kv == 300 * 64 // 2
    assert memory.inference.resident_set == 4 * 25 * 64 // 2
    assert memory.inference.key_index == 300 * 2 * 2 * (4 + 4) // 2
    assert memory.inference.selection_scratch == 2 * 300 * 2 * (4 + 1 + 1 / 4) // 2
    assert memory.inference.staging == 0
    copied = memory_of(
        Placement(kind=PlacementKind.IN_PROCESS, tp_size=2),
        TINY,
        replace(LOAD, own_predictor_dtype="int8"),
    )
    assert copied.inference.weights == memory.inference.weights
    assert memory.inference.predictor == 0
    assert copied.inference.predictor == TINY.predictor_copy_bytes("int8") // 2


def test_fitted_projections_are_held_beside_w_q() -> None:
    own, far = (
        Placement(kind=PlacementKind.IN_PROCESS, tp_size=1),
        Placement(kind=PlacementKind.SEPARATE, tp_size=1, num_cache_gpus=1),
    )
    for placement in (own, far):
        plain, fitted = (
            memory_of(placement, TINY, load).inference
            for load in (LOAD, replace(LOAD, is_fitted=True))
        )
        assert fitted.weights == plain.weights
        assert (plain.predictor, fitted.predictor) == (0, TINY.predictor_bytes)
    selection = SelectionSettings(declared=DeclaredPolicy(predictor="FILE"))
    assert Workload.from_selection(selection, context_tokens=100, concurrency=1).is_fitted
    idle = memory_of(
        Placement(kind=PlacementKind.IN_PROCESS, tp_size=2), TINY, replace(LOAD, selects=False)
    )
    assert idle.inference.selection_scratch == 0


def test_scratch_is_what_the_kernels_ask_for() -> None:
    """But for padding at the end of a row, sums of programs and lists."""
    device = torch.device("cpu")
    scratch = make_select_scratch(8, 32, 8, 65536, 2048, device)
    mirror = make_mirror_scratch(8, 8, 65536, device, may_repeat=False)
    parts = (scratch.score.logits, scratch.score.tile_max, scratch.score.zero_dot, mirror.bits)
    load = replace(LOAD, context_tokens=65536, concurrency=8)
    needed = 2 * sum(part.nbytes for part in parts)
    assert scratch_bytes(QWEN, load) == pytest.approx(needed, rel=0.01)
    own = make_mirror_scratch(8, 8, 65536, device)  # of a policy that ranks itself
    assert own.places is not None
    assert 2 * (own.bits.nbytes + own.places.nbytes) < needed


def test_scratch_is_as_wide_as_the_longest_request_that_is_taken() -> None:
    wide = replace(LOAD, max_context=400)
    assert scratch_bytes(TINY, wide) == scratch_bytes(TINY, replace(LOAD, context_tokens=400))


def test_more_gpus_than_kv_heads_have_the_same_heads_again() -> None:
    def kept(tp_size: int) -> tuple[int, int, int]:
        placement = Placement(kind=PlacementKind.IN_PROCESS, tp_size=tp_size)
        own = memory_of(placement, TINY, replace(LOAD, index_dtype="int8")).inference
        return own.kv, own.key_index, own.resident_set

    assert kept(4) == kept(2)
    assert kept(2)[0] == kept(1)[0] // 2


def test_dense_keeps_kv_only() -> None:
    memory = memory_of(Placement(kind=PlacementKind.DENSE, tp_size=2), TINY, LOAD)
    assert memory.inference.kv == 300 * 64 // 2
    assert memory.inference.resident_set == memory.inference.key_index == 0


def test_activations_by_hand() -> None:
    assert activation_bytes(TINY, LOAD, 2) == 50 * (4 * 8 + 24) * 2 + 2 * 3 * 10 * 4


@pytest.mark.parametrize(("dtype", "per_head"), [("native", 0), ("int8", 132), ("int4", 72)])
def test_index_bytes_per_key(dtype: str, per_head: int) -> None:
    load = replace(LOAD, index_dtype=dtype)
    assert index_bytes(QWEN, load) == 300 * 36 * 8 * per_head


def test_exact_policy_has_no_index() -> None:
    assert index_bytes(QWEN, replace(LOAD, selects=False)) == 0


@given(
    context=st.integers(1, 200_000),
    concurrency=st.integers(1, 256),
    more=st.integers(1, 50_000),
    dtype=st.sampled_from(["native", "int8", "int4"]),
    gpus=st.integers(1, 8),
)
def test_memory_is_monotone(
    context: int, concurrency: int, more: int, dtype: str, gpus: int
) -> None:
    load = replace(LOAD, context_tokens=context, concurrency=concurrency, index_dtype=dtype)
    for placement in possible_placements(QWEN, gpus):
        before = memory_of(placement, QWEN, load).largest.total
        for grown in (
            replace(load, context_tokens=context + more),
            replace(load, concurrency=concurrency + more),
        ):
            assert memory_of(placement, QWEN, grown).largest.total >= before


@given(gpus=st.integers(1, 64))
def test_placements_have_heads_for_all_and_use_no_more_gpus(gpus: int) -> None:
    for shape in map(find_shape, BUILT_IN_CONFIGS):
        placements = possible_placements(shape, gpus)
        assert len({item.name for item in placements}) == len(placements)
        for item in placements:
            assert item.num_gpus <= gpus
            assert shape.num_kv_heads % item.tp_size == 0
            assert item.num_cache_gpus % item.tp_size == 0
            assert item.num_cache_gpus <= shape.num_kv_heads


@pytest.mark.parametrize(
    ("gpus", "names"),
    [
        (1, ["dense-tp1", "in-process-tp1"]),
        (2, ["dense-tp2", "in-process-tp2", "1+1"]),
        (3, ["dense-tp2", "in-process-tp2", "1+1", "1+2"]),
        (4, ["dense-tp4", "in-process-tp4", "1+1", "tp2+2", "1+3"]),
        (6, ["dense-tp4", "in-process-tp4", "1+1", "tp2+2", "1+5"]),
        (16, ["dense-tp8", "in-process-tp8", "1+1", "tp8+8"]),
    ],
)
def test_placements_of_few_gpus(gpus: int, names: list[str]) -> None:
    assert [item.name for item in possible_placements(QWEN, gpus)] == names


def test_a_model_directory_gives_the_shape_of_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert replace(find_shape(str(tmp_path)), name="qwen3-8b") == QWEN
    assert find_shape(str(tmp_path), dtype="float32").item_bytes == 4


MIXTURES = {
    46.70: {
        "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    30.53: {
        "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 48, "hidden_size": 2048,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "moe_intermediate_size": 768, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    14.32: {
        "architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 24, "hidden_size": 2048,
        "num_attention_heads": 16, "moe_intermediate_size": 1408, "vocab_size": 151936,
        "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
    },
    106.85: {
        "architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 46, "hidden_size": 4096,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "vocab_size": 151552,
        "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("billions", MIXTURES)
def test_mixtures_of_experts_have_the_published_parameter_counts(billions: float) -> None:
    shape = shape_of_config(MIXTURES[billions], name="m", dtype="bfloat16")
    assert shape.weight_bytes / 2 == pytest.approx(billions * 1e9, rel=2e-3)


def test_a_step_reads_the_experts_that_its_tokens_go_through() -> None:
    """Qwen3-30B-A3B: 3.35 billion parameters a token, 0.31 of them the input embedding."""
    shape = shape_of_config(MIXTURES[30.53], name="m", dtype="bfloat16")
    table = 151936 * 2048
    assert shape.step_weight_bytes(1) / 2 + table == pytest.approx(3.35e9, rel=2e-3)
    # Of two tokens with 8 of 128 experts each, half an expert is shared on average.
    layer = 15.5 * 3 * 768 * 2048 + 128 * 2048 + shape.attention_parameters
    assert shape.step_weight_bytes(2) == pytest.approx(2 * (48 * layer + table), rel=1e-6)
    assert shape.step_weight_bytes(4096) == pytest.approx(shape.weight_bytes - 2 * table, rel=1e-6)
    assert shape.mlp_width == 8 * 768


def test_models_without_a_gate_have_two_matrices() -> None:
    config = CONFIG | {"architectures": ["ArceeForCausalLM"]}
    shape = shape_of_config(config, name="m", dtype="bfloat16")
    assert QWEN.weight_bytes - shape.weight_bytes == 36 * 4096 * 12288 * 2


def test_wrong_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="qwen3-8b"):
        find_shape(str(tmp_path / "nothing"))
    with pytest.raises(SettingsError, match="dtype=int3"):
        find_shape("qwen3-8b", dtype="int3")
    with pytest.raises(
        UnsupportedModelError, match=r"num_experts_per_tok=9 of num_local_experts=8"
    ):
        shape_of_config(MIXTURES[46.70] | {"num_experts_per_tok": 9}, name="m", dtype="bfloat16")
    with pytest.raises(UnsupportedModelError, match=r"sliding-window.*docs/models\.md"):
        shape_of_config(MIXTURES[46.70] | {"sliding_window": 4096}, name="m", dtype="bfloat16")
    with pytest.raises(UnsupportedModelError, match=r"MambaForCausalLM.*docs/models\.md"):
        shape_of_config({"architectures": ["MambaForCausalLM"]}, name="m", dtype="bfloat16")
    lacking = {key: value for key, value in CONFIG.items() if key != "intermediate_size"}
    with pytest.raises(UnsupportedModelError, match="intermediate_size"):
        shape_of_config(lacking, name="m", dtype="bfloat16")


def test_wrong_loads_are_refused() -> None:
    with pytest.raises(SettingsError, match="concurrency=0"):
        replace(LOAD, concurrency=0)
    with pytest.raises(SettingsError, match="--cache-tokens"):
        replace(LOAD, capacity_tokens=99)
