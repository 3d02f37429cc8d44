# SPDX-License-Identifier: Apache-2.0
"""Mapped memory of two GPUs: who owns which tensor, who may use it, and what is refused."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from fake_driver import GRANULARITY, FakeDriver

from tandemkv.cache_rank.protocol.errors import ProtocolError, SettingsError
from tandemkv.cache_rank.protocol.gpu_flags import GpuFlags, flag_specs
from tandemkv.cache_rank.protocol.handshake import check_hello
from tandemkv.cache_rank.protocol.head_shard import parts_of
from tandemkv.cache_rank.protocol.memory import shared_devices
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes, MappedTensors
from tandemkv.cache_rank.protocol.memory.one_device import APART, ONE_DEVICE_VARIABLE
from tandemkv.cache_rank.protocol.memory.shared_devices import (
    engine_homes,
    far_gpu,
    gpu_uuids,
    inference_homes,
    one_gpu_homes,
    same_gpu,
)
from tandemkv.cache_rank.protocol.memory.shared_region import (
    RegionSizes,
    part_books,
    pools_of,
    specs_by_life,
)
from tandemkv.cache_rank.protocol.messages import PROTOCOL_VERSION, Hello
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec, part_of
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    RankSettings,
    SelectionSettings,
)

MODEL = ModelSpec(
    architecture="LlamaForCausalLM", num_layers=3, num_qo_heads=4, num_kv_heads=2, head_dim=8,
    hidden_size=32, max_context=64, dtype="float32", model_hash="0",
)  # fmt: skip
SELECTION = SelectionSettings(
    budget_tokens=16, num_sink_tokens=4, num_recent_tokens=8, sample_tokens=6
)
SIZES = RegionSizes(num_slots=40, num_rows=5, page_size=4, is_apart=True)
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
BESIDE_THE_MODEL = {
    "resident_k", "resident_v", "sample_k", "sample_v", "sample_log_weight", "req_to_token",
    "outputs", "remote_outputs", "to_inference",
}  # fmt: skip
BESIDE_THE_ENGINE = {
    "kv", "streams", "queries", "seed_queries", "step_rows", "step_lengths", "to_engine",
}  # fmt: skip
ON_THE_HOST = {"flags", "ring"}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    driver.install(monkeypatch)
    return driver


def homes_of(here: torch.device) -> Homes:
    return Homes(inference=FIRST, engine=SECOND, here=here)


def made_by(homes: Homes) -> MappedTensors:
    tensors = MappedTensors(homes)
    for specs in specs_by_life(MODEL, SELECTION, SIZES, on_gpu=homes.are_on_gpu):
        tensors.allocate_all(specs)
    return tensors


def mapped_by(homes: Homes, made: MappedTensors) -> MappedTensors:
    tensors = MappedTensors(homes)
    for spec, descriptor in zip(made.specs, made.descriptors, strict=True):
        tensors.attach(spec, os.dup(descriptor))
    return tensors


def test_each_region_names_its_owner() -> None:
    owners: dict[str, set[str]] = {"inference": set(), "engine": set(), "host": set()}
    for specs in specs_by_life(MODEL, SELECTION, SIZES, on_gpu=True):
        for spec in specs:
            owners[spec.home].add(spec.name)
    assert owners["inference"] == BESIDE_THE_MODEL
    assert owners["engine"] == BESIDE_THE_ENGINE
    assert owners["host"] == ON_THE_HOST


def test_one_device_has_the_sets_behind_the_tokens() -> None:
    near = replace(SIZES, is_apart=False)
    specs = {s.name: s for each in specs_by_life(MODEL, SELECTION, near, on_gpu=True) for s in each}
    assert BESIDE_THE_MODEL & set(specs) == {
        "sample_log_weight", "req_to_token", "outputs", "to_inference",
    }  # fmt: skip
    slots = 40 + 5 * SELECTION.num_resident
    assert specs["kv"].shape == (3, 2, -(-slots // 4) * 4, 2, 8)


@pytest.mark.parametrize("on_both", [False, True])
def test_memory_is_made_on_its_owner_and_opened_to_who_works_on_it(
    on_both: bool, driver: FakeDriver
) -> None:
    driver.contexts = {0, 1} if on_both else {0}
    made = made_by(homes_of(FIRST))
    for gpu, names in ((0, BESIDE_THE_MODEL), (1, BESIDE_THE_ENGINE)):
        wanted = sorted(-(-made_spec(made, n).nbytes // GRANULARITY) * GRANULARITY for n in names)
        assert sorted(size for owner, size in driver.created if owner == gpu) == wanted
    assert all(users == ([0, 1] if on_both else [0]) for users in driver.opened.values())
    # The engine maps what came, and makes its books on its own GPU.
    num_made, driver.contexts = len(driver.opened), {0, 1} if on_both else {1}
    seen = mapped_by(homes_of(SECOND), made)
    assert len(driver.created) == len(BESIDE_THE_MODEL) + len(BESIDE_THE_ENGINE)
    books = MappedTensors(homes_of(SECOND))
    books.allocate("resident_positions", (3, 5, 2, 4), torch.int32)
    assert driver.created[-1][0] == 1
    seen_by_engine = list(driver.opened.values())[num_made:]
    assert len(seen_by_engine) == num_made + 1
    assert all(users == ([1, 0] if on_both else [1]) for users in seen_by_engine)
    for tensors in (made, seen, books):
        tensors.close()
    assert driver.num_mapped == 0


def made_spec(tensors: MappedTensors, name: str) -> Any:
    return next(spec for spec in tensors.specs if spec.name == name)


@pytest.mark.parametrize("on_gpus", [False, True])
def test_what_the_engine_writes_is_what_the_model_reads(on_gpus: bool, driver: FakeDriver) -> None:
    """Of two owners on a host, both anonymous files, as of two GPUs."""
    made = made_by(homes_of(FIRST) if on_gpus else Homes.on_host())
    seen = mapped_by(homes_of(SECOND) if on_gpus else Homes.on_host(), made)
    assert bool(driver.created) is on_gpus
    assert part_books(seen, MODEL, SELECTION, SIZES).specs == ()
    pools = pools_of(seen, MODEL, SELECTION, SIZES)
    assert pools.is_far
    assert pools.num_slots == 40
    assert pools.num_rows == 5
    width = SELECTION.num_resident + SELECTION.num_recent_tokens
    for layer, (k, v) in enumerate(pools.resident):
        assert k.shape == v.shape == (5, width, 2, 8)
        k[layer + 1, 2] = 10 + layer
        v[layer + 1, 3] = 20 + layer
    pools.k[1][39] = 5.0
    assert pools.log_weight is not None
    pools.log_weight[2, 4] = 7.0
    for layer in range(3):
        assert bool((made["resident_k"][layer, layer + 1, 2] == 10 + layer).all())
        assert bool((made["resident_v"][layer, layer + 1, 3] == 20 + layer).all())
    assert bool((made["kv"][1, 0, 39] == 5.0).all())
    assert bool((made["sample_log_weight"][2, 4] == 7.0).all())
    made.close()
    seen.close()


@pytest.fixture
def three(driver: FakeDriver) -> FakeDriver:
    """Three GPUs that reach each other's memory."""
    driver.peers = {(a, b) for a in range(3) for b in range(3) if a != b}
    return driver


def test_several_engines_have_layers_of_the_pool_and_what_is_their_own(three: FakeDriver) -> None:
    """Layers lie on either GPU; staging is beside the engine that reads it, flags beside both."""
    third = torch.device("cuda", 2)
    sizes = replace(SIZES, num_sharing=2)
    homes = Homes(inference=FIRST, engine=SECOND, here=FIRST, pools=(SECOND, third))
    kept = MappedTensors(homes)
    kept.allocate_all(specs_by_life(MODEL, SELECTION, sizes, on_gpu=True).kept)
    owner = dict(
        zip((spec.name for spec in kept.specs), (x for x, _ in three.created), strict=True)
    )
    assert {owner.pop("kv_0"), owner.pop("kv_1")} == {1, 2}
    assert set(owner.values()) == {0}
    assert "to_inference" in owner
    assert [len(kept[name]) for name in ("kv_0", "kv_1")] == [1, 2]
    for shard in parts_of(2, 2):
        three.created.clear()
        own_homes, model = homes.with_engine(shard.index), part_of(MODEL, shard)
        own_sizes = replace(sizes, shard=shard)
        kept_too, own, epoch = specs_by_life(model, SELECTION, own_sizes, on_gpu=True)
        assert kept_too == kept.specs
        ours = MappedTensors(own_homes)
        ours.allocate_all((*own, *epoch))
        assert {gpu for gpu, _ in three.created} == {0, 1 + shard.index}
        beside_it = {x.name for x in own if x.home == "engine"}
        assert beside_it == BESIDE_THE_ENGINE - {"kv"}
        seen = MappedTensors(replace(own_homes, here=own_homes.engine))
        for tensors in (kept, ours):
            for spec, descriptor in zip(tensors.specs, tensors.descriptors, strict=True):
                seen.attach(spec, os.dup(descriptor))
        assert part_books(seen, model, SELECTION, own_sizes).specs == ()
        with pytest.raises(ProtocolError, match="start both ranks with the same"):
            part_books(seen, model, SELECTION, replace(own_sizes, num_sharing=1))
        pools = pools_of(seen, model, SELECTION, own_sizes)
        for layer in range(3):
            pools.k[layer][5] = 1.0 + layer + 10 * shard.index
        seen.close()
        ours.close()
    whole = pools_of(kept, MODEL, SELECTION, sizes)
    assert [k[5, :, 0].tolist() for k in whole.k] == [[1 + x, 11 + x] for x in range(3)]
    with pytest.raises(ProtocolError, match=r"memory of cache rank 5 .* --cache-ranks"):
        kept.allocate("kv_5", (1,), torch.float32, "pool_5")
    kept.close()
    assert three.num_mapped == 0


def test_by_messages_the_pumps_of_several_map_one_pool_beside_the_model(
    driver: FakeDriver,
) -> None:
    """Whole, on its GPU; words that all raise are enough for the largest step of each."""
    count = 3
    sizes = replace(SIZES, num_rows=33, num_sharing=count, has_whole_pool=True)
    model = msgspec.structs.replace(MODEL, num_kv_heads=8, num_qo_heads=16)
    driver.contexts = {0}
    homes = Homes(inference=FIRST, engine=FIRST, here=FIRST)
    kept = MappedTensors(homes)
    kept.allocate_all(specs_by_life(model, SELECTION, sizes, on_gpu=True).kept)
    assert kept["kv"].shape == (3, 2, 40, 8, 8)
    assert {owner for owner, _ in driver.created} == {0}
    own = MappedTensors(homes)
    own.allocate_all(flag_specs(model.num_layers, sizes.max_batch)[:1])
    own.borrow(kept)
    flags = [GpuFlags(own, model.num_layers, number) for number in range(count)]
    for size in (1, 32):
        for number, each in enumerate(flags):
            assert each.ready(1, size).shape == (size,)
            each.ready(1, size).fill_(10 + number)
        found = flags[0].all_ready(1, count, size).view(count, size)
        assert found.tolist() == [[10 + number] * size for number in range(count)]
    for shard, heads in zip(parts_of(count, 8), (2, 3, 3), strict=True):
        part = part_of(model, shard)
        assert part.num_kv_heads == heads
        here = specs_by_life(part, SELECTION, replace(sizes, shard=shard), on_gpu=True)
        assert here.kept == kept.specs
        staged = {spec.name: spec for spec in here.own}
        assert set(staged) == BESIDE_THE_ENGINE - {"kv"} | {"outputs", "remote_outputs"}
        assert staged["queries"].shape[2] == 2 * heads
        far = specs_by_life(part, SELECTION, replace(SIZES, num_rows=33), on_gpu=True)
        assert next(x for x in far.kept if x.name == "kv").shape == (3, 2, 40, heads, 8)
        assert far.own == here.own, "a step is staged alike on both hosts"
    own.close()
    kept.close()
    assert driver.num_mapped == 0


def test_another_layout_is_refused(driver: FakeDriver) -> None:
    made = made_by(homes_of(FIRST))
    near = replace(SIZES, is_apart=False)
    with pytest.raises(ProtocolError, match=r"'kv' must be .*; start both ranks with the same"):
        part_books(made, MODEL, SELECTION, near)
    made.close()


def test_gpus_without_peer_access_are_refused_at_start(driver: FakeDriver) -> None:
    driver.peers = {(1, 0)}
    said = r"cuda:0 cannot use the memory of cuda:1.*peer access.*--cache-ranks 0"
    with pytest.raises(SettingsError, match=said):
        made_by(homes_of(FIRST))
    assert driver.num_mapped == 0


def test_a_full_gpu_is_one_clear_error(driver: FakeDriver) -> None:
    driver.free = GRANULARITY
    tensors = MappedTensors(homes_of(FIRST))
    with pytest.raises(SettingsError, match=r"kv needs 0\.\d+ GiB, cuda:1 has .*--cache-tokens"):
        tensors.allocate("kv", (1 << 16,), torch.float32, "engine")
    with pytest.raises(SettingsError, match=r"sets needs .*cuda:0 has"):
        tensors.allocate("sets", (1 << 16,), torch.float32, "inference")
    assert tensors.specs == ()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two GPUs, of which each has a name of its own."""

    def properties(gpu: torch.device) -> Any:
        return SimpleNamespace(uuid=f"GPU-{gpu.index}")

    monkeypatch.delenv(ONE_DEVICE_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _gpu: None)
    monkeypatch.setattr(shared_devices.torch.cuda, "get_device_properties", properties)
    return monkeypatch


def test_both_processes_name_the_same_gpus(gpus: pytest.MonkeyPatch) -> None:
    ours, theirs = engine_homes(torch.device("cuda")), inference_homes(FIRST)
    assert (ours.inference, ours.engine, ours.here) == (FIRST, SECOND, SECOND)
    assert (theirs.inference, theirs.engine, theirs.here) == (FIRST, SECOND, FIRST)
    assert gpu_uuids(ours) == gpu_uuids(theirs) == ("GPU-0", "GPU-1")
    assert gpu_uuids(Homes.on_host()) == ()
    for value in ("1", APART):
        gpus.setenv(ONE_DEVICE_VARIABLE, value)
        assert engine_homes(torch.device("cuda")).engine == FIRST
    gpus.delenv(ONE_DEVICE_VARIABLE)
    gpus.setattr(torch.cuda, "device_count", lambda: 1)
    for make in (lambda: engine_homes(torch.device("cuda")), lambda: inference_homes(FIRST)):
        with pytest.raises(SettingsError, match=r"second GPU, 1 seen.*--cache-ranks 0"):
            make()


def test_by_messages_each_rank_has_all_memory_on_its_own_gpu(gpus: pytest.MonkeyPatch) -> None:
    near, far = one_gpu_homes(FIRST), one_gpu_homes(far_gpu("cuda", 3))
    assert {near.inference, near.engine, near.here} == {FIRST}
    assert {far.inference, far.engine, far.here} == {SECOND}
    assert same_gpu(gpu_uuids(near), gpu_uuids(far)) is None
    said = same_gpu(gpu_uuids(far), gpu_uuids(far))
    assert said is not None
    assert "GPU-1" in said
    assert "CUDA_VISIBLE_DEVICES" in said
    on_host = one_gpu_homes(far_gpu("cpu", 0))
    assert not on_host.are_on_gpu
    assert same_gpu((), gpu_uuids(on_host)) is None
    assert "same --device" in (same_gpu((), gpu_uuids(far)) or "")
    gpus.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingsError, match="--device cpu"):
        far_gpu("cuda", 0)


def test_the_engine_of_a_tensor_parallel_rank_is_behind_all_gpus_of_the_model(
    gpus: pytest.MonkeyPatch,
) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 4)
    for rank in (0, 1):
        model, engine = torch.device("cuda", rank), torch.device("cuda", 2 + rank)
        ours = engine_homes(torch.device("cuda"), rank, 2)
        theirs = inference_homes(model, 2)
        assert (ours.inference, ours.engine, ours.here) == (model, engine, engine)
        assert (theirs.inference, theirs.engine, theirs.here) == (model, engine, model)
        assert gpu_uuids(ours) == gpu_uuids(theirs)


@pytest.mark.parametrize("num_before", [1, 2])
def test_several_engines_of_a_rank_are_behind_each_other(
    gpus: pytest.MonkeyPatch, num_before: int
) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 4 * num_before)
    for rank in range(3 * num_before):
        ours = engine_homes(torch.device("cuda"), rank, num_before, 3)
        model = torch.device("cuda", rank // 3)
        theirs = inference_homes(model, num_before, 3)
        assert ours.inference == theirs.here == model
        assert ours.here == ours.engine == torch.device("cuda", num_before + rank)
        first = num_before + 3 * (rank // 3)
        assert (
            ours.pools == theirs.pools == tuple(torch.device("cuda", first + n) for n in range(3))
        )
        assert gpu_uuids(ours) == gpu_uuids(theirs.with_engine(rank % 3))
        assert len(gpu_uuids(ours)) == 5
    gpus.setattr(torch.cuda, "device_count", lambda: 4 * num_before - 1)
    with pytest.raises(SettingsError, match="needs a GPU each"):
        inference_homes(torch.device("cuda", num_before - 1), num_before, 3)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (("GPU-0", "GPU-1"), None),
        (("GPU-1", "GPU-0"), r"the model's GPU is GPU-1 as .* GPU-0 as .*CUDA_VISIBLE_DEVICES"),
        (("GPU-0", "GPU-2"), r"the cache rank's GPU is GPU-2 as .*same GPUs in the same order"),
        (("GPU-0",) * 5, r"inference rank counts 5 GPUs, .* rank 2; .*same --cache-ranks"),
        ((), r"the inference rank is on the host's CPU, the cache rank on GPUs; .*--device"),
    ],
)
def test_an_index_that_means_another_gpu_is_refused_in_the_handshake(
    theirs: tuple[str, ...], said: str | None
) -> None:
    settings, token = RankSettings(), b"t" * 32
    hello = Hello(
        protocol_version=PROTOCOL_VERSION, token=token, model=MODEL, settings=settings.flat(),
        max_rows=4, page_size=4, gpus=theirs,
    )  # fmt: skip
    refused = check_hello(
        hello, token=token, model=MODEL, settings=settings, gpus=("GPU-0", "GPU-1")
    )
    if said is None:
        assert refused is None
        return
    assert refused is not None
    assert refused.field == "gpus"
    assert re.search(said, refused.message), refused.message
