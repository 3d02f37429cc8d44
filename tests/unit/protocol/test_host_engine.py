# SPDX-License-Identifier: Apache-2.0
"""An engine on the host's CPU beside a model on a GPU: whose memory is what, and who locks it.

CUDA's runtime is played on a host: it notes what is locked, and an address is its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.policies.attending import AttendingPolicy
from tandemkv.cache_rank.policies.base import Policy, PolicyError
from tandemkv.cache_rank.policies.composition import check_placement
from tandemkv.cache_rank.policies.lfps import LfpsPolicy
from tandemkv.cache_rank.policies.registry import selection_values
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.memory import pinned_memory
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes, MappedTensors
from tandemkv.cache_rank.protocol.memory.one_device import ONE_DEVICE_VARIABLE
from tandemkv.cache_rank.protocol.memory.shared_devices import gpu_uuids
from tandemkv.cache_rank.protocol.memory.shared_region import (
    RegionSizes,
    part_books,
    pools_of,
    specs_by_life,
)
from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.placement import Placement, has_host_engine
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    RankSettings,
    SelectionSettings,
)

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
MODEL = ModelSpec(
    architecture="LlamaForCausalLM", num_layers=3, num_qo_heads=4, num_kv_heads=2, head_dim=8,
    hidden_size=16, max_context=64, dtype="float32", model_hash="0",
)  # fmt: skip
SELECTION = SelectionSettings.model_validate(
    selection_values({"policy": "lfps", "num_sink_tokens": 4, "num_recent_tokens": 8})
)
SIZES = RegionSizes(num_slots=40, num_rows=5, page_size=4, is_apart=True, maps_sets=False)
PLACED = Placement(model_device="cuda", host_engine=True)


class Error(Enum):
    """What calls return."""

    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidValue = 1


@dataclass
class FakeRuntime:
    """Notes what is locked; `refused` are names of calls that fail."""

    refused: set[str] = field(default_factory=set)
    locked: dict[int, int] = field(default_factory=dict)
    cudaError_t = Error
    cudaHostRegisterPortable, cudaHostRegisterMapped = 1, 2

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Error]:
        assert flags == 3
        assert address % os.sysconf("SC_PAGE_SIZE") == 0
        if "cudaHostRegister" in self.refused:
            return (Error.cudaErrorMemoryAllocation,)
        self.locked[address] = nbytes
        return (Error.cudaSuccess,)

    def cudaHostGetDevicePointer(self, address: int, flags: int) -> tuple[Error, int]:
        assert flags == 0
        if "cudaHostGetDevicePointer" in self.refused:
            return Error.cudaErrorInvalidValue, 0
        assert address in self.locked
        return Error.cudaSuccess, address

    def cudaHostUnregister(self, address: int) -> tuple[Error]:
        del self.locked[address]
        return (Error.cudaSuccess,)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    found = FakeRuntime()
    construct = torch._C._construct_storage_from_data_pointer
    fake = SimpleNamespace(
        empty=lambda size, dtype, device: torch.empty(size, dtype=dtype),
        uint8=torch.uint8,
        cuda=SimpleNamespace(device=torch.device, synchronize=lambda _gpu: None),
        _C=SimpleNamespace(
            _construct_storage_from_data_pointer=lambda address, _gpu, nbytes: construct(
                address, CPU, nbytes
            )
        ),
    )
    monkeypatch.setattr(pinned_memory, "torch", fake)
    monkeypatch.setattr(pinned_memory, "import_module", lambda _name: found)
    return found


def made_and_seen() -> tuple[MappedTensors, MappedTensors]:
    """All tensors as the model's process makes them, and as the engine's maps them."""
    made = MappedTensors(Homes.beside_gpu(GPU, here=GPU))
    for specs in specs_by_life(MODEL, SELECTION, SIZES, on_gpu=made.homes.are_on_gpu):
        made.allocate_all(specs)
    seen = MappedTensors(Homes.beside_gpu(GPU, here=CPU))
    for spec, descriptor in zip(made.specs, made.descriptors, strict=True):
        seen.attach(spec, os.dup(descriptor))
    return made, seen


def test_all_that_both_map_is_host_memory_that_the_gpus_process_locks(
    runtime: FakeRuntime,
) -> None:
    made, seen = made_and_seen()
    locked = [spec for spec in made.specs if spec.home != "host"]
    assert sorted(runtime.locked.values()) == sorted(spec.nbytes for spec in locked)
    names = {spec.name for spec in locked}
    assert names >= {"kv", "req_to_token", "queries", "outputs", "to_engine", "to_inference"}
    assert not names & {"resident_k", "resident_v", "flags", "ring"}
    assert not any(bool(made[spec.name].any()) for spec in made.specs)  # of zeros
    made["to_engine"][0, 0], seen["outputs"][1, 2, 3] = 7, 5.0
    assert (int(seen["to_engine"][0, 0]), float(made["outputs"][1, 2, 3])) == (7, 5.0)
    # What the engine makes is mapped by the model's process, and held beyond the engine.
    books = MappedTensors(seen.homes)
    books.allocate("books", (3,), torch.int64).fill_(9)
    made.attach(books.specs[0], os.dup(books.descriptors[0]))
    books.close()
    assert made["books"].tolist() == [9] * 3
    assert len(runtime.locked) == len(locked) + 1
    seen.close()
    made.close()
    assert not runtime.locked


def test_the_engine_gets_the_pool_and_no_sets(runtime: FakeRuntime) -> None:
    made, seen = made_and_seen()
    assert part_books(seen, MODEL, SELECTION, SIZES).specs == ()
    pools = pools_of(seen, MODEL, SELECTION, SIZES)
    assert (pools.num_slots, pools.num_rows, pools.is_far) == (40, 5, True)
    assert {tuple(x.shape) for pair in pools.resident for x in pair} == {(5, 0, 2, 8)}
    made["kv"][2, 1, 39] = 3.0
    assert bool((pools.v[2][39] == 3.0).all())
    assert gpu_uuids(made.homes) == gpu_uuids(seen.homes) == ()
    for tensors in (made, seen):
        tensors.close()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("cudaHostRegister", r"locked for cuda:0: cudaErrorMemoryAllocation; lower --cache-tokens"),
        ("cudaHostGetDevicePointer", r"cuda:0 cannot use host memory of kv: .*--device cpu"),
    ],
)
def test_memory_that_the_gpu_cannot_use_is_told(call: str, said: str, runtime: FakeRuntime) -> None:
    runtime.refused = {call}
    tensors = MappedTensors(Homes.beside_gpu(GPU, here=GPU))
    with pytest.raises(SettingsError, match=said):
        tensors.allocate("kv", (4, 4), torch.float32)
    assert (tensors.specs, runtime.locked) == ((), {})


def test_without_the_bindings_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(pinned_memory, "import_module", missing)
    with pytest.raises(SettingsError, match=r"pip install 'tandemkv\[gpu\]'"):
        Homes.beside_gpu(GPU, here=GPU).gpu("engine")


def test_the_placement_says_where_the_engine_is() -> None:
    assert (PLACED.engine_device, PLACED.has_far_pool, PLACED.two_gpus) == ("cpu", True, False)
    assert "model on cuda, cache rank in a process of its own, on the host's CPU" in (
        PLACED.describe()
    )
    assert Placement(model_device="cuda").engine_device == "cuda"
    ours, theirs = (RankSettings(placement=Placement(host_engine=x)).flat() for x in (True, False))
    assert {name for name in ours if ours[name] != theirs[name]} == {"placement.host_engine"}


@pytest.mark.parametrize(
    ("link", "device", "attends", "value", "is_so"),
    [
        ("shared", "cuda", True, None, True),
        ("shared", "cuda", False, None, False),
        ("shared", "cpu", True, None, False),
        ("shared", "cpu", True, "apart", False),
        ("shared", "cpu", True, "host", True),
        ("local", "cuda", True, None, False),
        ("message", "cpu", True, "host", False),
    ],
)
def test_of_a_policy_that_attends_the_engine_is_on_the_host(
    link: str, device: str, attends: bool, value: str | None, is_so: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv(ONE_DEVICE_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(ONE_DEVICE_VARIABLE, value)
    assert has_host_engine(link, device, attends=attends) is is_so


def test_one_that_selects_is_not_played_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ONE_DEVICE_VARIABLE, "host")
    with pytest.raises(SettingsError, match=r"use --policy lfps, or TANDEMKV_ONE_DEVICE=apart"):
        has_host_engine("shared", "cpu", attends=False)


def test_steps_beside_an_engine_on_the_cpu_are_captured_unless_they_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_placement(LfpsPolicy, "lfps", PLACED)
    slow: type[Policy] = type("Slow", (AttendingPolicy,), {})
    declared = SimpleNamespace(
        has_slow_steps=True, graph_safe=False, attends=True, prediction=None, selects=False,
        timing=Timing.SAME_STEP_ATTENTION,
    )  # fmt: skip
    monkeypatch.setattr(slow, "capabilities", declared, raising=False)
    with pytest.raises(PolicyError, match="slow: its decode steps are not captured"):
        check_placement(slow, "slow", PLACED)
