# SPDX-License-Identifier: Apache-2.0
"""Models some of whose layers have a sliding window, and attention sinks."""

from __future__ import annotations

import math
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_query_predictor import DIM, HEADS, HIDDEN, RMSNorm, RotaryEmbedding, make_model, rotate
from tiny_models import attend_by_definition

from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.models.predictor_weights import MappedPredictor, put_weights
from tandemkv.inference_rank.attention.native import attend_where, causal
from tandemkv.inference_rank.attention.resident_attention import join_sinks
from tandemkv.inference_rank.links.query_predictor import LiveQueryPredictor
from tandemkv.inference_rank.links.query_projection import QueryPlace
from tandemkv.inference_rank.sglang import hooks
from tandemkv.inference_rank.sglang import versions as sglang_versions
from tandemkv.inference_rank.sglang.pool import layers_of_pool, make_local_pool_class
from tandemkv.inference_rank.start import local
from tandemkv.kernels.attention import attend_paged
from tandemkv.kernels.merge import merge_attention

QUERY_HEADS, KV_HEADS, WIDTH = 4, 2, 8
SCALE = 0.3


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


@pytest.mark.parametrize("lse_unit", [1.0, math.log(2.0)])
def test_a_sink_is_one_more_logit(lse_unit: float) -> None:
    """The newest of 11 tokens attends to 7 of them, and then to 4 more, in two parts."""
    query, keys, values = draw(1, QUERY_HEADS, WIDTH), draw(11, KV_HEADS, WIDTH), draw(11, 2, WIDTH)
    sinks = torch.tensor([-30.0, 0.0, 2.0, 40.0]).bfloat16()
    want = attend_by_definition(
        query.double(), keys.double(), values.double(), sinks, scale=SCALE, window=None
    )
    parts = []
    for slots in (range(7), range(7, 11)):
        table = torch.tensor([list(slots)])
        parts.append(
            attend_paged(query, keys, values, table, torch.tensor([len(slots)]), scale=SCALE)
        )
    (out, lse), rest = parts
    joined, joined_lse = join_sinks(out, lse / lse_unit, sinks, lse_unit=lse_unit)
    found, _ = merge_attention(joined, joined_lse * lse_unit, *rest)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)
    assert float(found[0, 3].abs().max()) < 1e-6, "a sink of 40 takes all of the softmax"
    without, _ = merge_attention(out, lse, *rest)
    torch.testing.assert_close(found[:, 0], without[:, 0])


def test_joined_sinks_keep_the_dtype() -> None:
    out, lse = draw(3, QUERY_HEADS, WIDTH).bfloat16(), draw(3, QUERY_HEADS)
    found, joined = join_sinks(out, lse, torch.zeros(QUERY_HEADS))
    assert (found.dtype, joined.dtype) == (torch.bfloat16, torch.float32)
    assert found.is_contiguous()
    assert bool((joined > lse).all())


@pytest.mark.parametrize("window", [-1, 0, 3, 100])
@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("count", [1, 5, 12])
def test_attention_on_a_cpu_is_the_definition(window: int, has_sinks: bool, count: int) -> None:
    query, keys, values = draw(count, QUERY_HEADS, WIDTH), draw(12, 2, WIDTH), draw(12, 2, WIDTH)
    sinks = draw(QUERY_HEADS) * 3 if has_sinks else None
    found = attend_where(query, keys, values, causal(count, 12, window), sinks, scale=SCALE)
    want = attend_by_definition(
        query, keys, values, sinks, scale=SCALE, window=None if window < 0 else window
    )
    torch.testing.assert_close(found, want)


class Pool:
    """What SGLang's pool does to make its buffers."""

    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]

    def __init__(self, size: int, page_size: int, layer_num: int) -> None:
        self.size, self.page_size, self.layer_num = size, page_size, layer_num
        self._create_buffers()

    def _create_buffers(self) -> None:
        shape = (self.size + self.page_size, KV_HEADS, WIDTH)
        self.k_buffer = [torch.zeros(shape) for _ in range(self.layer_num)]
        self.v_buffer = [torch.zeros(shape) for _ in range(self.layer_num)]
        self._kv_buffer_descs = self._build_kv_buffer_descs()
        self._init_data_ptrs_and_strides()

    def _build_kv_buffer_descs(self) -> list[int]:
        return [len(x) for x in (*self.k_buffer, *self.v_buffer)]

    def _init_data_ptrs_and_strides(self) -> None:
        self.data_ptrs = [x.data_ptr() for x in (*self.k_buffer, *self.v_buffer)]


@pytest.mark.parametrize("windowed", [(), (0, 2)])
def test_only_full_layers_have_room_for_resident_sets(windowed: tuple[int, ...]) -> None:
    pool = make_local_pool_class(Pool, 24, windowed)(100, 4, 3)
    wanted = [104 if layer in windowed else 128 for layer in range(3)]
    assert [len(x) for x in pool.k_buffer] == wanted
    assert [len(x) for x in pool.v_buffer] == wanted
    assert (pool.size, pool.layer_num) == (100, 3)
    assert pool._kv_buffer_descs == 2 * wanted
    assert pool.data_ptrs == [x.data_ptr() for x in (*pool.k_buffer, *pool.v_buffer)]
    assert len(set(pool.data_ptrs)) == 6


def test_layers_of_linear_attention_have_no_slots() -> None:
    """SGLang's pool numbers the others among themselves; ours is inside."""
    own = make_local_pool_class(Pool, 24)(100, 4, 2)
    own.dtype = torch.float32
    pool = SimpleNamespace(full_kv_pool=own, full_attention_layer_id_mapping={1: 0, 3: 1})
    for stored, buffers in zip(layers_of_pool(pool, 5), (own.k_buffer, own.v_buffer), strict=True):
        assert [len(layer) for layer in stored] == [0, 128, 0, 128, 0]
        assert [stored[x].data_ptr() for x in (1, 3)] == [x.data_ptr() for x in buffers]
        assert {layer.shape[1:] for layer in stored} == {(KV_HEADS, WIDTH)}
    plain = layers_of_pool(own, 2)
    assert [x.data_ptr() for x in plain[0]] == [x.data_ptr() for x in own.k_buffer]


@pytest.mark.parametrize(
    ("sinks", "window", "reads_images", "module"),
    [
        (False, None, False, "flashinfer"),
        (False, None, True, "flashinfer"),
        (True, None, False, "triton"),
        (False, 511, True, "triton"),
    ],
)
def test_a_gpu_has_a_backend_for_what_the_model_has(
    sinks: bool, window: int | None, reads_images: bool, module: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """FlashInfer's is told of images, for stock computes prompts by another kernel then."""
    for name, kind in (("flashinfer", "FlashInferAttnBackend"), ("triton", "TritonAttnBackend")):
        path = f"sglang.srt.layers.attention.{name}_backend"
        made = types.SimpleNamespace(name=name, is_multimodal=None)
        backend = types.SimpleNamespace(**{kind: lambda *_, made=made, **__: made})
        monkeypatch.setitem(sys.modules, path, backend)  # which import what needs a GPU
    model = types.SimpleNamespace(has_sinks=sinks)
    monkeypatch.setattr(local, "architecture_of", lambda _: model)
    whole, text = object(), object()
    config = types.SimpleNamespace(hf_config=whole, hf_text_config=text if reads_images else whole)
    runner = types.SimpleNamespace(
        device="cuda:0", sliding_window_size=window, model=None, model_config=config
    )
    found = local.full_backend(runner)
    assert found.name == module
    assert found.is_multimodal == (reads_images if module == "flashinfer" else None)
    if module == "flashinfer":
        del found.is_multimodal
        with pytest.raises(ContractError, match="no is_multimodal"):
            local.full_backend(runner)


class Args:
    """SGLang's arguments, as far as they choose a backend."""

    def __init__(self, *backends: str | None) -> None:
        self._backends = backends

    def _resolved_attention_backends(self) -> tuple[str | None, ...]:
        return self._backends


@pytest.fixture(params=[17, 18, 19, 23])
def resolved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What SGLang's adjustments are told, in versions of both kinds: a function of `Args`."""
    monkeypatch.setattr(sglang_versions, "_number", lambda: request.param)
    if request.param < 19:
        return lambda args: args._resolved_attention_backends()
    module: Any = types.ModuleType("model_hook")
    module.attention_backends_of = Args._resolved_attention_backends
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.model_hook", module)
    return lambda args: module.attention_backends_of(args)


def test_sglang_takes_ours_for_a_backend_with_sinks(resolved: Any) -> None:
    adjust, seen = hooks._as_a_backend_with_sinks("tandemkv"), []
    args = Args("tandemkv", "tandemkv")
    adjust(lambda args: seen.append(resolved(args)), args)
    assert seen == [("triton", "triton")]
    assert resolved(args) == ("tandemkv", "tandemkv")
    adjust(lambda args: seen.append(resolved(args)), Args("fa3", None))
    assert seen[-1] == ("fa3", None)


def test_a_check_that_fails_leaves_the_arguments_as_they_were(resolved: Any) -> None:
    def fail(_args: Any) -> None:
        raise AssertionError

    args = Args("tandemkv", "tandemkv")
    with pytest.raises(AssertionError):
        hooks._as_a_backend_with_sinks("tandemkv")(fail, args)
    assert resolved(args) == ("tandemkv", "tandemkv")


class Gemma3RMSNorm(torch.nn.Module):
    """What SGLang's class of this name holds; not to be called."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size) * 0.1)
        self.eps = 1e-6


def hybrid_model() -> Any:
    """Three layers as SGLang builds Gemma 3's, of which the first has a window."""
    model = make_model(has_bias=False, has_norm=True, norm=RMSNorm, rotary=RotaryEmbedding)
    layers = model.model.layers
    layers.insert(0, SimpleNamespace(self_attn=SimpleNamespace()))
    rotary = RotaryEmbedding()
    for layer in layers[1:]:
        layer.input_layernorm = Gemma3RMSNorm(HIDDEN)
        layer.self_attn.q_norm = Gemma3RMSNorm(DIM)
        layer.self_attn.rotary_emb = rotary
    return model


def predictor_of(model: Any) -> LiveQueryPredictor:
    predictor = LiveQueryPredictor(
        model, QueryPlace(num_heads=HEADS, head_dim=DIM, device=torch.device("cpu")), skipped=(0,)
    )
    predictor.load()
    return predictor


def by_definition(layer: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    def normed(x: torch.Tensor, norm: Gemma3RMSNorm) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
        return scaled * (1.0 + norm.weight.detach().double())

    weight = layer.self_attn.qkv_proj.weight[: HEADS * DIM].double()
    query = normed(hidden.double(), layer.input_layernorm) @ weight.T
    query = normed(query.view(len(hidden), HEADS, DIM), layer.self_attn.q_norm)
    return rotate(query, positions)


def test_full_layers_are_predicted_for_here_and_elsewhere() -> None:
    """A norm's weights count from one; layers with a window need not even have projections."""
    model = hybrid_model()
    predictor, mapped = predictor_of(model), MappedTensors()
    put_weights(mapped, *predictor.weights())
    elsewhere = MappedPredictor(mapped, 3, HEADS)
    hidden, positions = torch.randn(5, HIDDEN), torch.tensor([0, 3, 70, 5, 900])
    for layer in (1, 2):
        want = by_definition(model.model.layers[layer], hidden, positions)
        for predict in (predictor, elsewhere):
            found = predict(layer, hidden, positions).double()
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert len(mapped["predict_weight"]) == 2


def test_full_layers_of_different_angles_stay_in_one_process() -> None:
    model = hybrid_model()
    other = RotaryEmbedding()
    other.cos_sin_cache = other.cos_sin_cache.flip(0)
    model.model.layers[2].self_attn.rotary_emb = other
    predictor = predictor_of(model)
    with pytest.raises(ContractError, match=r"different angles.*--cache-ranks 0"):
        predictor.weights()
    other.cos_sin_cache = model.model.layers[1].self_attn.rotary_emb.cos_sin_cache.clone()
    predictor.weights()
