# SPDX-License-Identifier: Apache-2.0
"""A part of the KV heads: views of one pool, and the queries that are predicted for it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from tandemkv.cache_rank.protocol.errors import ProtocolError, SettingsError
from tandemkv.cache_rank.protocol.head_shard import HeadShard, parts_of
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import (
    RegionSizes,
    is_pool,
    kept_specs,
    part_books,
    pools_of,
    specs_by_life,
)
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec, part_for, part_of
from tandemkv.cache_rank.protocol.models.predictor_weights import (
    PREDICTOR_PREFIX,
    MappedPredictor,
    put_weights,
    weights_for,
)
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.query import QueryWeights, quantize_query_weight

MODEL = ModelSpec(
    architecture="LlamaForCausalLM", num_layers=2, num_qo_heads=6, num_kv_heads=3, head_dim=4,
    hidden_size=24, max_context=32, dtype="float32", model_hash="0",
)  # fmt: skip
SELECTION = SelectionSettings(
    budget_tokens=8, num_sink_tokens=2, num_recent_tokens=4, sample_tokens=6
)
SIZES = RegionSizes(num_slots=20, num_rows=3, page_size=1)


def test_parts_are_views_that_together_are_all() -> None:
    whole = torch.arange(24).view(2, 6, 2)
    parts = [part.of(whole, 1) for part in parts_of(3, 3)]
    assert torch.equal(torch.cat(parts, 1), whole)
    parts[1].fill_(-1)
    assert (whole[:, 2:4] == -1).all()
    assert HeadShard().of(whole, 1) is whole


@pytest.mark.parametrize(("count", "heads", "sizes"), [(3, 8, [2, 3, 3]), (2, 5, [2, 3])])
def test_heads_need_not_be_divided_evenly(count: int, heads: int, sizes: list[int]) -> None:
    """Query heads, and rows of their weights, go with the KV head that they share."""
    parts = parts_of(count, heads)
    for group in (1, 4):
        whole = torch.arange(heads * group)
        views = [part.of(whole, 0) for part in parts]
        assert torch.equal(torch.cat(views), whole)
        assert [len(view) for view in views] == [group * size for size in sizes]
        assert [part.part(len(whole)) for part in parts] == [group * size for size in sizes]
        assert all(part.whole(part.part(len(whole))) == len(whole) for part in parts)
    model = replace_heads(MODEL, 4 * heads, heads)
    found = [part_for(model, Placement(head_shards=count), rank) for rank in range(count)]
    assert [shard for _, shard in found] == list(parts)
    assert [own.num_qo_heads for own, _ in found] == [4 * size for size in sizes]
    assert {own.gqa_group_size for own, _ in found} == {4}


def test_of_each_tensor_parallel_rank_the_heads_are_divided() -> None:
    model = replace_heads(MODEL, 16, 8)
    found = [part_for(model, Placement(tp_size=2, head_shards=3), rank) for rank in range(6)]
    assert [own.num_kv_heads for own, _ in found] == [1, 1, 2] * 2
    assert [shard.bounds for _, shard in found] == [(0, 1), (1, 2), (2, 4)] * 2
    with pytest.raises(SettingsError, match="5 share 4 KV heads"):
        part_for(model, Placement(tp_size=2, head_shards=5), 0)


def replace_heads(model: ModelSpec, num_qo_heads: int, num_kv_heads: int) -> ModelSpec:
    return msgspec.structs.replace(model, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("num_layers", [2, 5])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("is_apart", [False, True])
def test_every_shard_maps_one_pool_and_writes_its_own_heads(
    is_apart: bool, count: int, num_layers: int
) -> None:
    """Where each has a GPU, layers of the pool lie on all of them."""
    sizes = replace(SIZES, is_apart=is_apart, num_sharing=count)
    whole_model = msgspec.structs.replace(MODEL, num_layers=num_layers)
    kept = MappedTensors()
    specs = kept_specs(whole_model, SELECTION, sizes)
    homes = [spec.home for spec in specs if is_pool(spec)]
    assert homes == ([f"pool_{n}" for n in range(count)] if is_apart else ["engine"])
    kept.allocate_all(specs)
    for shard in parts_of(count, 3):
        model, own = part_of(whole_model, shard), replace(sizes, shard=shard)
        assert kept_specs(model, SELECTION, own) == specs
        pools = pools_of(kept, model, SELECTION, own)
        assert pools.log_weight is not None
        number = shard.index + 1.0
        for layer in range(num_layers):
            tensors = (pools.k[layer], pools.v[layer], *pools.resident[layer])
            for tensor in tensors:
                assert tensor.shape[-2:] == (model.num_kv_heads, 4)
                tensor.fill_(number)
        pools.log_weight.fill_(number)
    whole = pools_of(kept, whole_model, SELECTION, sizes)
    assert whole.log_weight is not None
    want = torch.tensor([1.0, 2.0, 3.0] if count == 3 else [1.0, 2.0, 2.0])
    for layer in range(num_layers):
        for tensor in (whole.k[layer], whole.v[layer], *whole.resident[layer]):
            assert torch.equal(tensor, want[:, None].expand_as(tensor))
    assert torch.equal(whole.log_weight, want[:, None].expand_as(whole.log_weight))
    kept.close()


def test_staging_is_of_the_shard_and_another_shard_count_is_refused() -> None:
    own = replace(SIZES, shard=HeadShard(1, 3, 3))
    model = part_of(MODEL, own.shard)
    specs = [x for some in specs_by_life(model, SELECTION, own, on_gpu=False) for x in some]
    shapes = {spec.name: spec.shape for spec in specs}
    assert shapes["kv"][3] == 3
    assert shapes["queries"][2] == 2
    tensors = MappedTensors()
    tensors.allocate_all(specs)
    part_books(tensors, model, SELECTION, own)
    with pytest.raises(ProtocolError, match="mapped tensor 'kv' must be"):
        part_books(tensors, model, SELECTION, SIZES)
    tensors.close()


def weights_of(norm: str, *, is_int8: bool) -> QueryWeights:
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    width = MODEL.num_qo_heads * MODEL.head_dim
    weight, scale = random(width, MODEL.hidden_size), None
    if is_int8:
        weight, scale = quantize_query_weight(weight, torch.device("cpu"))
    size = {"none": 0, "head": MODEL.head_dim, "all": width}[norm]
    return QueryWeights(
        head_dim=MODEL.head_dim,
        weight=weight,
        weight_scale=scale,
        bias=random(width),
        norm=random(MODEL.hidden_size),
        query_norm=random(size) if size else None,
        norm_eps=1e-5,
        query_norm_eps=1e-5,
    )


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("norm", ["none", "head", "all"])
@pytest.mark.parametrize("is_int8", [False, True])
def test_predicted_queries_do_not_depend_on_the_shards(
    norm: str, is_int8: bool, count: int
) -> None:
    """A norm over all heads is over all of them, whoever predicts."""
    mapped = MappedTensors()
    angles = torch.rand(40, MODEL.head_dim)
    layers = [weights_of(norm, is_int8=is_int8), None]
    put_weights(mapped, layers, angles)
    hidden, positions = torch.randn(5, MODEL.hidden_size), torch.tensor([0, 3, 17, 5, 30])
    want = MappedPredictor(mapped, 2, MODEL.num_qo_heads)(0, hidden, positions)
    made = [mapped]
    for whose in ("all", "sent to another host", "put for the part"):
        parts = []
        for shard in parts_of(count, 3):
            if whose == "all":
                own = mapped
            elif whose == "sent to another host":
                own = alone_with(mapped, shard)
            else:
                own = MappedTensors()
                put_weights(own, layers, angles, shard)
            made.append(own)
            heads = shard.part(MODEL.num_qo_heads)
            parts.append(MappedPredictor(own, 2, heads, shard)(0, hidden, positions))
            assert parts[-1].shape == (5, heads, 4)
        torch.testing.assert_close(torch.cat(parts, 1), want)
    for tensors in made:
        tensors.close()


def alone_with(mapped: MappedTensors, shard: HeadShard) -> MappedTensors:
    """Return what another host has for its heads."""
    found = MappedTensors()
    for name, part in weights_for(mapped, shard).items():
        found.allocate(name, tuple(part.shape), part.dtype, "host").copy_(part)
    return found


@pytest.mark.parametrize("name", ["form", "layers", "weight", "query_norm"])
@pytest.mark.parametrize("is_there", [False, True])
def test_weights_that_are_incomplete_are_refused(name: str, *, is_there: bool) -> None:
    """With a tensor of one dimension in the place of another; who has no weights at all may."""
    mapped = MappedTensors()
    assert weights_for(mapped, HeadShard(1, 3, 3)) == {}
    put_weights(mapped, [weights_of("all", is_int8=False)], torch.rand(40, MODEL.head_dim))
    mapped.forget(f"predict_{name}")
    if is_there:
        mapped.allocate(f"predict_{name}", (5,), torch.float32, "host")
    said = "weight" if is_there and name == "layers" else name  # of how many layers it tells
    if is_there or name != "query_norm":
        for use in (weights_for, lambda *_: MappedPredictor(mapped, 1, 12)):
            with pytest.raises(ProtocolError, match=rf"\['{said}'"):
                use(mapped, HeadShard(1, 3, 3))
    mapped.close()


@pytest.mark.parametrize("heads", [1, 3, 4])
def test_weights_of_other_heads_are_refused(heads: int) -> None:
    """Those of all, or of the part: with another split of them queries would be other heads'."""
    mapped = MappedTensors()
    put_weights(mapped, [weights_of("head", is_int8=False)], torch.rand(40, MODEL.head_dim))
    with pytest.raises(ProtocolError, match=r"\['weight'\] are of another model"):
        MappedPredictor(mapped, 1, heads, HeadShard(1, 3, 3))
    mapped.close()


@pytest.mark.parametrize("name", ["query_norm", "weight"])
def test_weights_that_do_not_fit_together_are_refused(name: str) -> None:
    """A pump gets them from another process, and goes on with the next."""
    mapped = MappedTensors()
    mapped.allocate(PREDICTOR_PREFIX + name, (8,), torch.float32)
    with pytest.raises(ProtocolError, match="weights of the prediction"):
        weights_for(mapped, HeadShard(0, 2, 2))
    mapped.close()
