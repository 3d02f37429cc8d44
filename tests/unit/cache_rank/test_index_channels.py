# SPDX-License-Identifier: Apache-2.0
"""An index of some channels: what is chosen is what keys without the others would have chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_world import DIM, HEADS, LAYERS, MODEL, World
from msgspec import structs

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.models.index_channels import (
    check_index_channels,
    indexed_layers,
    num_index_channels,
    read_index_channels,
    write_index_channels,
)
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec, part_for
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

KEPT = 6
LENGTHS = {1: 200, 3: 150}


def some_channels(heads: int = HEADS) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        layer: torch.stack(
            [torch.randperm(DIM, generator=generator)[:KEPT].sort().values for _ in range(heads)]
        )
        for layer in range(LAYERS)
    }


@pytest.fixture
def path(tmp_path: Path) -> str:
    write_index_channels(tmp_path / "c.safetensors", MODEL, some_channels(), {})
    return str(tmp_path / "c.safetensors")


def chosen(world: World) -> dict[int, torch.Tensor]:
    """Return what each layer chooses in a step, in rising order."""
    for row, length in LENGTHS.items():
        world.prefill(row, length - 1)
    world.decode([*LENGTHS], [*LENGTHS.values()])
    return {layer: found.sort(-1).values for layer, (found, _) in world.rank._chosen.items()}


@pytest.mark.parametrize("index_dtype", ["int8", "int4"])
@pytest.mark.parametrize("policy", ["look_ahead", "oracle"])
def test_what_is_chosen(path: str, policy: str, index_dtype: str) -> None:
    given = {"policy": policy, "index_dtype": index_dtype, "sample_tokens": 0}
    few, bare = World(index_channels=path, **given), World(**given)
    full = World(**given)
    for layer, channels in some_channels().items():
        for head in range(HEADS):
            others = sorted(set(range(DIM)) - set(channels[head].tolist()))
            bare.pools.k[layer][:, head, others] = 0.0
    found, want, of_all = chosen(few), chosen(bare), chosen(full)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[layer], want[layer]) for layer in found)
    assert not any(torch.equal(found[layer], of_all[layer]) for layer in found)
    assert few.rank._index.nbytes < 0.6 * full.rank._index.nbytes


@pytest.mark.parametrize("index_dtype", ["int8", "int4"])
def test_the_index_says_which_channels_it_has(path: str, index_dtype: str) -> None:
    few = World(index_channels=path, index_dtype=index_dtype).rank._index
    for layer in range(1, LAYERS):  # the first is exact
        found = few.channels(layer)
        assert found is not None
        assert torch.equal(found, some_channels()[layer])
    assert World(index_dtype=index_dtype).rank._index.channels(2) is None


def test_prompts_are_scored_with_all_channels(path: str) -> None:
    few, full = World(index_channels=path, index_dtype="int8"), World(index_dtype="native")
    for world in (few, full):
        world.prefill(1, 200)
    for layer in range(1, LAYERS):
        assert torch.equal(few.resident(layer, 1)[1], full.resident(layer, 1)[1])


def test_a_successor_indexes_the_same(path: str) -> None:
    world = World(index_channels=path, index_dtype="int4")
    chosen(world)
    before = [tensor.clone() for tensor in world.rank._index.keys(2) if tensor is not None]
    again = world.make()
    again.resume(
        [*LENGTHS], [*LENGTHS.values()],
        [world.table[row, :length] for row, length in LENGTHS.items()],
        restored=[False, False], reseeded=[True, True],
    )  # fmt: skip
    table = world.table[1, : 200 // 16 * 16 : 16].long() // 16
    for old, new in zip(before, again._index.keys(2), strict=True):
        assert new is not None
        assert torch.equal(old[table], new[table])


def test_each_rank_reads_those_of_its_heads(tmp_path: Path) -> None:
    """Of four KV heads over two tensor-parallel ranks, with one or two cache ranks each."""
    whole = replace_heads(4)
    channels = some_channels(4)
    write_index_channels(tmp_path / "c", whole, channels, {})
    selection = SelectionSettings(index_channels=str(tmp_path / "c"))
    for tp_size, shards in ((1, 1), (2, 1), (2, 2), (1, 3)):
        parts, placement = [], Placement(tp_size=tp_size, head_shards=shards)
        for rank in range(tp_size * shards):
            model, shard = part_for(whole, placement, rank)
            parts.append(read_index_channels(selection, [2], shard.heads(model.num_kv_heads))[2])
        assert torch.equal(torch.cat(parts), channels[2])
    shard = part_for(whole, Placement(tp_size=8), 5)[1]
    assert shard.heads(1) == range(2, 3)  # two ranks have each head


def test_a_file_of_something_else_is_refused(path: str, tmp_path: Path) -> None:
    selection = SelectionSettings(index_channels=path)
    check_index_channels(selection, MODEL)
    assert num_index_channels(selection) == KEPT
    assert num_index_channels(SelectionSettings()) is None
    with pytest.raises(SettingsError, match="num_kv_heads is 2, and 4 is served; make one with"):
        check_index_channels(selection, structs.replace(MODEL, num_kv_heads=4))
    with pytest.raises(SettingsError, match="rows, and those up to 3 are asked for"):
        read_index_channels(selection, [0], range(1, 3))
    with pytest.raises(SettingsError, match=r"index_channels=.*none: cannot be read"):
        check_index_channels(SelectionSettings(index_channels=str(tmp_path / "none")), MODEL)
    for wrong in (-1, DIM):
        layers = some_channels()
        layers[2][1, 0] = wrong
        write_index_channels(tmp_path / "wrong", MODEL, layers, {})
        beyond = SelectionSettings(index_channels=str(tmp_path / "wrong"))
        with pytest.raises(
            SettingsError, match=r"layers\.2 names channels that keys of \d+ do not"
        ):
            read_index_channels(beyond, [1, 2], range(HEADS))
    layers = some_channels()
    del layers[4]
    write_index_channels(tmp_path / "less", MODEL, layers, {})
    with pytest.raises(SettingsError, match=r"layers\.4 is None, not \(2, 6\)"):
        check_index_channels(SelectionSettings(index_channels=str(tmp_path / "less")), MODEL)
    (of_another,) = read_index_channels(
        SelectionSettings(index_channels=str(tmp_path / "less")), [4], range(HEADS)
    ).values()
    assert of_another.shape == (HEADS, KEPT)  # for an engine that is measured
    assert indexed_layers(MODEL) == list(range(LAYERS))


def replace_heads(count: int) -> ModelSpec:
    return structs.replace(MODEL, num_kv_heads=count, num_qo_heads=2 * count)


def test_the_first_head_of_a_shard() -> None:
    assert HeadShard(1, 3, 3, before=3).heads(1) == range(4, 5)
    assert HeadShard(before=2).heads(2) == range(2, 4)
    assert replace(HeadShard(), before=1).of(torch.arange(3), 0).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("model_hash", "told"), [("of others", True), ("", False)])
def test_other_weights_are_told_of_where_weights_are_at_hand(
    path: str, caplog: pytest.LogCaptureFixture, model_hash: str, told: bool
) -> None:
    selection = SelectionSettings(index_channels=path)
    check_index_channels(selection, structs.replace(MODEL, model_hash=model_hash))
    assert ("was fitted to other weights" in caplog.text) is told
