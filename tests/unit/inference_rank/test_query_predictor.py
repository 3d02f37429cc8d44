# SPDX-License-Identifier: Apache-2.0
"""Queries predicted with the served model's own modules, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.inference_rank.links.query_predictor import LiveQueryPredictor
from tandemkv.inference_rank.links.query_projection import QueryPlace

HIDDEN, HEADS, KV_HEADS, DIM = 12, 3, 1, 4
EPS = 1e-6


class Norm(nn.Module):
    """RMSNorm, called as SGLang's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weight


class Rotary(nn.Module):
    """Half-split RoPE of flat queries and keys, in place, called as SGLang's."""

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for flat in (query, key):
            flat.copy_(rotate(flat.view(len(flat), -1, DIM), positions).view(len(flat), -1))
        return query, key


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate ``[B, H, D]``."""
    half = DIM // 2
    inverse = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = positions[:, None, None].to(x.dtype) * inverse
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
    )


class RMSNorm(nn.Module):
    """What SGLang's class of this name holds; not to be called."""

    variance_size_override: int | None = None

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = EPS


class RotaryEmbedding(nn.Module):
    """Likewise."""

    is_neox_style, rotary_dim, head_size = True, DIM, DIM

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(1000)[:, None] * 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), -1)


def make_model(
    *,
    has_bias: bool,
    has_norm: bool,
    dtype: torch.dtype = torch.float32,
    norm: type[Norm | RMSNorm] = Norm,
    rotary: type[Rotary | RotaryEmbedding] = Rotary,
) -> Any:
    """Two decoder layers with SGLang's names."""
    torch.manual_seed(3)
    layers = []
    for _ in range(2):
        width = (HEADS + 2 * KV_HEADS) * DIM
        projection = SimpleNamespace(
            weight=torch.randn(width, HIDDEN).to(dtype),
            bias=torch.randn(width) if has_bias else None,
        )
        attention = SimpleNamespace(qkv_proj=projection, rotary_emb=rotary())
        if has_norm:
            attention.q_norm = norm(DIM)
        layers.append(SimpleNamespace(input_layernorm=norm(HIDDEN), self_attn=attention))
    model = type("Qwen3ForCausalLM" if has_norm else "LlamaForCausalLM", (), {})()
    model.model = SimpleNamespace(layers=layers)
    return model


@pytest.mark.parametrize(("has_bias", "has_norm"), [(False, False), (True, False), (False, True)])
def test_against_float64(has_bias: bool, has_norm: bool) -> None:
    model = make_model(has_bias=has_bias, has_norm=has_norm)
    predict = LiveQueryPredictor(
        model, QueryPlace(num_heads=HEADS, head_dim=DIM, device=torch.device("cpu"))
    )
    predict.load()
    hidden, positions = torch.randn(5, HIDDEN), torch.tensor([0, 3, 70, 5, 900])
    before = hidden.clone()
    found = predict(1, hidden, positions)
    assert torch.equal(hidden, before)

    layer = model.model.layers[1]
    size = HEADS * DIM
    normed = layer.input_layernorm.double()(hidden.double())
    query = normed @ layer.self_attn.qkv_proj.weight[:size].double().T
    if has_bias:
        query = query + layer.self_attn.qkv_proj.bias[:size].double()
    query = query.view(5, HEADS, DIM)
    if has_norm:
        query = layer.self_attn.q_norm.double()(query)
    torch.testing.assert_close(found.double(), rotate(query, positions), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("has_bias", "has_norm"), [(False, False), (True, False), (False, True)])
def test_plain_layers_are_not_called_and_predict_the_same(has_bias: bool, has_norm: bool) -> None:
    hidden, positions = torch.randn(5, HIDDEN), torch.tensor([0, 3, 70, 5, 900])
    found = []
    for modules in ({}, {"norm": RMSNorm, "rotary": RotaryEmbedding}):
        model = make_model(has_bias=has_bias, has_norm=has_norm, **modules)
        predict = LiveQueryPredictor(
            model, QueryPlace(num_heads=HEADS, head_dim=DIM, device=torch.device("cpu"))
        )
        predict.load()
        found.append(predict(1, hidden, positions))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("has_bias", "has_norm"), [(False, False), (True, False), (False, True)])
def test_copies_in_int8_predict_nearly_the_same(has_bias: bool, has_norm: bool) -> None:
    hidden, positions = torch.randn(5, HIDDEN), torch.tensor([0, 3, 70, 5, 900])
    model = make_model(has_bias=has_bias, has_norm=has_norm, norm=RMSNorm, rotary=RotaryEmbedding)
    found = []
    for is_int8 in (False, True):
        predict = LiveQueryPredictor(
            model,
            QueryPlace(num_heads=HEADS, head_dim=DIM, device=torch.device("cpu"), is_int8=is_int8),
        )
        predict.load()
        found.append(predict(1, hidden, positions))
        for own, layer in zip(predict._layers, model.model.layers, strict=True):
            assert own.fused is not None
            live = layer.self_attn.qkv_proj.weight
            if is_int8:
                assert own.weight is own.fused.weight
                assert own.fused.weight.dtype == torch.int8
                assert own.fused.weight.shape == (HEADS * DIM, HIDDEN)
                assert own.fused.weight_scale is not None
            else:
                assert own.fused.weight_scale is None
                assert own.fused.weight.data_ptr() == live.data_ptr()
    # Half a scale, 1.5 % of a weight of 1, over a dozen of them.
    assert float((found[1] - found[0]).abs().max()) < 0.2
    assert float(torch.cosine_similarity(found[1], found[0], dim=-1).min()) > 0.999


class Fitted:
    """Of layer 1, with rows for two ranks; `FittedQueries` reads such from a file."""

    num_query_rows = HEADS * DIM

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.weight, self.bias = torch.randn(HEADS * DIM, HIDDEN), torch.randn(HEADS * DIM)

    def layer(
        self, layer: int, rows: range, *, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if layer == 0:
            return None
        own = slice(rows.start, rows.stop)
        return self.weight[own].to(device, dtype), self.bias[own].to(device, dtype)


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize(("has_bias", "has_norm"), [(False, False), (True, False), (False, True)])
def test_a_fitted_projection_is_used_in_place_of_w_q(
    has_bias: bool, has_norm: bool, is_int8: bool
) -> None:
    """Norms, heads and rotation are those of the layer; a layer without one keeps its W_q.

    All layers have a bias then, so another process can be given those of all.
    """
    hidden, positions = torch.randn(5, HIDDEN), torch.tensor([0, 3, 70, 5, 900])
    modules: Any = {"norm": RMSNorm, "rotary": RotaryEmbedding}
    found = []
    fitted = Fitted()
    for given in (fitted, None):
        model = make_model(has_bias=has_bias, has_norm=has_norm, **modules)
        place = QueryPlace(
            num_heads=HEADS, head_dim=DIM, device=torch.device("cpu"), is_int8=is_int8,
            fitted=cast("Any", given),
        )  # fmt: skip
        predict = LiveQueryPredictor(model, place)
        predict.load()
        found.append([predict(layer, hidden, positions) for layer in (0, 1)])
        weights, _ = predict.weights()
        assert {x.bias is None for x in weights if x} == {given is None and not has_bias}
    assert torch.equal(found[0][0], found[1][0])
    layer = model.model.layers[1]
    scale = torch.rsqrt(hidden.double().pow(2).mean(-1, keepdim=True) + EPS)
    normed = hidden.double() * scale * layer.input_layernorm.weight.double()
    query = normed @ fitted.weight.double().T + fitted.bias.double()
    query = query.view(5, HEADS, DIM)
    if has_norm:
        own = torch.rsqrt(query.pow(2).mean(-1, keepdim=True) + EPS)
        query = query * own * layer.self_attn.q_norm.weight.double()
    want, error = rotate(query, positions), 0.2 if is_int8 else 1e-4
    torch.testing.assert_close(found[0][1].double(), want, rtol=error, atol=error)


def test_modules_that_are_called_keep_the_weights_as_they_are() -> None:
    hidden, positions = torch.randn(5, HIDDEN), torch.tensor([0, 3, 70, 5, 900])
    model = make_model(has_bias=True, has_norm=True)
    found = []
    for is_int8 in (False, True):
        predict = LiveQueryPredictor(
            model,
            QueryPlace(num_heads=HEADS, head_dim=DIM, device=torch.device("cpu"), is_int8=is_int8),
        )
        predict.load()
        found.append(predict(1, hidden, positions))
    assert torch.equal(found[0], found[1])


def test_a_norm_that_quantises_does_not_where_it_is_called() -> None:
    """SGLang's own pass has values, scale and dtype of it, for a projection in FP8."""
    hidden, positions = torch.randn(5, HIDDEN), torch.arange(5)
    model = make_model(has_bias=False, has_norm=True)
    predict = LiveQueryPredictor(
        model, QueryPlace(num_heads=HEADS, head_dim=DIM, device=torch.device("cpu"))
    )
    predict.load()
    want = predict(1, hidden, positions)
    norm = model.model.layers[1].input_layernorm
    norm.forward_native, norm._quant_linear = norm.forward, object()
    norm.forward = lambda hidden: (hidden, torch.tensor(0.5), torch.bfloat16)
    assert torch.equal(predict(1, hidden, positions), want)


class DualChunkRotaryEmbedding(RotaryEmbedding):
    """One that is not known to be plain."""


@pytest.mark.parametrize("change", ["norm", "rotary"])
def test_modules_that_do_more_are_called(change: str) -> None:
    model = make_model(has_bias=False, has_norm=True, norm=RMSNorm, rotary=RotaryEmbedding)
    layer = model.model.layers[1]
    if change == "norm":
        layer.self_attn.q_norm.variance_size_override = 2
    else:
        layer.self_attn.rotary_emb = DualChunkRotaryEmbedding()
    predict = LiveQueryPredictor(
        model, QueryPlace(num_heads=HEADS, head_dim=DIM, device=torch.device("cpu"))
    )
    predict.load()
    with pytest.raises(NotImplementedError):  # of these modules, which have no forward
        predict(1, torch.randn(5, HIDDEN), torch.arange(5))


def test_layers_unlike_the_list_are_refused() -> None:
    model = make_model(has_bias=False, has_norm=True)
    type(model).__name__ = "LlamaForCausalLM"
    with pytest.raises(ContractError, match=r"LlamaForCausalLM is not known to.*docs/models\.md"):
        load(model)
    type(model).__name__ = "ApertusForCausalLM"
    with pytest.raises(ContractError, match=r"layer 0 has no attention_layernorm"):
        load(model)
    type(model).__name__ = "GPT2LMHeadModel"
    with pytest.raises(ContractError, match=r"GPT2LMHeadModel is not supported.*docs/models\.md"):
        load(model)


def load(model: Any) -> None:
    LiveQueryPredictor(
        model, QueryPlace(num_heads=HEADS, head_dim=DIM, device=torch.device("cpu"))
    ).load()


@pytest.mark.parametrize("norm", [Norm, RMSNorm])
def test_gates_between_the_rows_of_heads_are_left_out(norm: type[Norm | RMSNorm]) -> None:
    """Modules in the layer itself; the rows of a head's gate follow those of its query."""
    rotary: type[Rotary | RotaryEmbedding] = RotaryEmbedding if norm is RMSNorm else Rotary
    plain = make_model(has_bias=False, has_norm=True, norm=norm, rotary=rotary)
    gated = make_model(has_bias=False, has_norm=True, norm=norm, rotary=rotary)
    for own, other in zip(plain.model.layers, gated.model.layers, strict=True):
        weight = own.self_attn.qkv_proj.weight
        query = weight[: HEADS * DIM].view(HEADS, DIM, HIDDEN)
        both = torch.stack((query, torch.randn_like(query)), 1).flatten(0, 2)
        other.qkv_proj = SimpleNamespace(weight=torch.cat((both, weight[HEADS * DIM :])), bias=None)
        other.attn, other.attn_output_gate = None, True
        other.rotary_emb, other.q_norm = own.self_attn.rotary_emb, own.self_attn.q_norm
        other.input_layernorm = own.input_layernorm
        del other.self_attn
    hidden, positions = torch.randn(5, HIDDEN), torch.arange(5) * 7
    place = QueryPlace(num_heads=HEADS, head_dim=DIM, device=torch.device("cpu"))
    wanted, found = (LiveQueryPredictor(model, place) for model in (plain, gated))
    wanted.load()
    found.load()
    for layer in range(2):
        assert torch.equal(found(layer, hidden, positions), wanted(layer, hidden, positions))
    gated.model.layers[0].qkv_proj.bias = torch.zeros(1)
    with pytest.raises(ContractError, match="bias of its queries and gates"):
        LiveQueryPredictor(gated, place).load()


def test_a_projection_that_is_packed_for_amx_is_refused() -> None:
    model = make_model(has_bias=False, has_norm=False)
    model.model.layers[0].self_attn.qkv_proj.use_intel_amx_backend = True
    with pytest.raises(ContractError, match=r"AMX.*--dtype float32"):
        load(model)


def test_each_rank_takes_its_part_of_a_norm_over_all_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its query has the direction of the whole layer's, and another length."""
    from sglang.srt import runtime_context

    half, hidden, positions = 2, torch.randn(5, HIDDEN), torch.tensor([0, 3, 70, 5, 900])
    layer = make_model(has_bias=False, has_norm=True, norm=RMSNorm, rotary=RotaryEmbedding)
    layer = layer.model.layers[0]
    weight, norm = torch.randn(2 * half * DIM, HIDDEN), RMSNorm(2 * half * DIM)
    layer.self_attn.q_norm = norm
    found = []
    for rank, num_ranks in ((0, 1), (0, 2), (1, 2)):
        place = SimpleNamespace(tp_rank=rank, tp_size=num_ranks)
        monkeypatch.setattr(runtime_context, "get_parallel", lambda place=place: place)
        heads = 2 * half // num_ranks
        own = weight[rank * heads * DIM :]
        layer.self_attn.qkv_proj = SimpleNamespace(weight=own, bias=None)
        model = type("OlmoeForCausalLM", (), {})()
        model.model = SimpleNamespace(layers=[layer])
        predict = LiveQueryPredictor(
            model, QueryPlace(num_heads=heads, head_dim=DIM, device=torch.device("cpu"))
        )
        predict.load()
        found.append(predict(0, hidden, positions))
    whole, parts = found[0], torch.cat(found[1:], 1)
    assert not torch.allclose(parts, whole, rtol=1e-3)
    cosine = torch.cosine_similarity(parts, whole, dim=-1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine))


def test_other_layers_are_refused() -> None:
    model = make_model(has_bias=False, has_norm=False)
    del model.model.layers[1].self_attn.rotary_emb
    with pytest.raises(ContractError, match=r"layer 1.*rotary_emb"):
        LiveQueryPredictor(
            model, QueryPlace(num_heads=HEADS, head_dim=DIM, device=torch.device("cpu"))
        ).load()


def test_a_quantised_projection_is_refused() -> None:
    model = make_model(has_bias=False, has_norm=False, dtype=torch.float8_e4m3fn)
    with pytest.raises(ContractError, match="quantised"):
        LiveQueryPredictor(
            model, QueryPlace(num_heads=HEADS, head_dim=DIM, device=torch.device("cpu"))
        ).load()
