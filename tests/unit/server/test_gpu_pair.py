# SPDX-License-Identifier: Apache-2.0
"""Two ranks on two GPUs: what the launcher decides, without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import CONFIG, write_model

from tandemkv.cache_rank.policies.registry import resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.memory.one_device import APART, ONE_DEVICE_VARIABLE
from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec
from tandemkv.server.checks.preflight import resolve_cache_rank, resolve_launch
from tandemkv.server.launch.sglang_command import cache_rank_env, sglang_argv, sglang_env
from tandemkv.server.plan.devices import as_pair, cache_rank_device, placed_alone
from tandemkv.server.plan.placement_choice import resolve_placement
from tandemkv.server.settings.launch_settings import ServeSettings


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return monkeypatch


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def test_a_cache_rank_needs_a_gpu_of_its_own(gpus: pytest.MonkeyPatch, model_dir: Path) -> None:
    memory = SimpleNamespace(total_memory=139 << 30, name="a GPU")
    gpus.setattr(torch.cuda, "get_device_properties", lambda _index: memory)
    gpus.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    gpus.delenv(ONE_DEVICE_VARIABLE, raising=False)

    def device_of(device: str, cache_ranks: int) -> str:
        given = {"model": str(model_dir), "port": 0, "cache_ranks": cache_ranks, "device": device}
        return resolve_launch(ServeSettings.model_validate(given), lambda _: None).device

    for device in ("cuda", "auto"):  # what was asked for is not done on the CPU unsaid
        with pytest.raises(SettingsError, match=r"needs 2 GPUs, 1 seen.*--cache-ranks 0.*cpu"):
            device_of(device, cache_ranks=1)
    assert device_of("cuda", cache_ranks=0) == "cuda"
    gpus.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("cuda", cache_ranks=1) == device_of("auto", cache_ranks=1) == "cuda"
    gpus.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto", cache_ranks=1) == "cpu"


def test_one_gpu_stands_for_two_where_tests_ask_for_it(
    gpus: pytest.MonkeyPatch, model_dir: Path
) -> None:
    given: dict[str, Any] = {"model": str(model_dir), "cache_ranks": 1, "port": 0}
    pair = ServeSettings.model_validate(given)
    said: list[str] = []
    memory = SimpleNamespace(total_memory=139 << 30, name="a GPU")
    gpus.setattr(torch.cuda, "get_device_properties", lambda _index: memory)
    gpus.delenv(ONE_DEVICE_VARIABLE, raising=False)
    with pytest.raises(SettingsError, match=r"needs 2 GPUs, 1 seen"):
        resolve_launch(pair.model_copy(update={"device": "cuda"}), said.append)
    gpus.setenv(ONE_DEVICE_VARIABLE, "1")
    (model_dir / "control").touch()  # as where CUDA MPS runs
    gpus.setenv("CUDA_MPS_PIPE_DIRECTORY", str(model_dir))
    for device in ("cuda", "auto"):
        launch = resolve_launch(pair.model_copy(update={"device": device}), said.append)
        assert (launch.device, launch.settings.rank_settings.placement.link) == ("cuda", "shared")
        environ = {ONE_DEVICE_VARIABLE: "1"}
        env = sglang_env(launch.settings, environ, run_dir=model_dir, device=launch.device)
        assert env[ONE_DEVICE_VARIABLE] == "1"


def test_cache_ranks_at_addresses_need_no_gpu_here(
    gpus: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether their number is given as well or not."""
    (tmp_path / "control").touch()  # as where CUDA MPS runs
    gpus.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    gpus.delenv(ONE_DEVICE_VARIABLE, raising=False)
    memory = SimpleNamespace(total_memory=139 << 30, name="a GPU")
    gpus.setattr(torch.cuda, "get_device_properties", lambda _index: memory)
    heads = {"num_key_value_heads": 3, "num_attention_heads": 6, "head_dim": 8}
    model_dir = write_model(tmp_path / "model", CONFIG | heads)
    given: dict[str, Any] = {"model": str(model_dir), "port": 0, "link_keys": "keys"}
    given["cache_rank_address"] = "tcp://10.0.0.2:7400,tcp://10.0.0.3:7400"
    for more in ({}, {"cache_ranks": 2}):
        launch = resolve_launch(ServeSettings.model_validate(given | more), lambda _: None)
        assert launch.device == "cuda"
        assert (launch.placement.link, launch.placement.head_shards) == ("message", 2)


@pytest.mark.parametrize("policy", ["sfi", "sync_kv"])
def test_what_a_gpu_does_not_capture_is_in_one_process_or_in_two_that_map_memory(
    policy: str, gpus: pytest.MonkeyPatch, model_dir: Path
) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 2)
    gpus.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    memory = SimpleNamespace(total_memory=139 << 30, name="a GPU")
    gpus.setattr(torch.cuda, "get_device_properties", lambda _index: memory)
    spec, said = read_model_spec(model_dir, dtype="bfloat16"), list[str]()

    def resolve(**given: Any) -> ServeSettings:
        settings = ServeSettings(model=str(model_dir), **given)
        return resolve_placement(settings, spec, model_dir, device="cuda", progress=said.append)

    def flags(settings: ServeSettings) -> tuple[str, ...]:
        return sglang_argv(settings, model_dir=model_dir, device="cuda", dtype="bfloat16", port=1)

    selection = resolve_selection({"policy": policy})
    settings = resolve(selection=selection)
    assert settings.rank_settings.placement.link == "local"
    assert f"decode steps of policy {policy} are not captured" in said[0]
    assert "--disable-cuda-graph" in flags(settings)
    for more in ({"transport": "shared"}, {"cache_ranks": 1}):
        settings = resolve(selection=selection, **more)
        placement = settings.rank_settings.placement
        assert (placement.link, placement.two_gpus) == ("shared", True)
        assert "--disable-cuda-graph" in flags(settings)
        assert "--disable-overlap-schedule" not in flags(settings)
    for more in ({"transport": "message"}, {"cache_ranks": 2}):
        with pytest.raises(SettingsError, match=rf"policy={policy}: .*use --cache-ranks 1"):
            resolve(selection=selection, **more)
    assert "--disable-cuda-graph" not in flags(resolve())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_processes_map_the_same_memory(device: str) -> None:
    pair = as_pair(ServeSettings(model="m"))
    placement = pair.placement_on(device, "a test says so")
    assert (placement.link, placement.model_device, placement.reason) == (
        "shared", device, "a test says so",
    )  # fmt: skip
    alone = placed_alone(ServeSettings(model="m"), device).rank_settings.placement
    assert (alone.link, alone.model_device) == ("shared", device)
    assert alone.reason == "the cache rank was started by itself"
    assert ServeSettings(model="m", cache_ranks=0).wished_link == "local"
    with pytest.raises(SettingsError, match="only `tandemkv serve` starts as many"):
        placed_alone(ServeSettings(model="m", tensor_parallel=2), device)


def test_both_ranks_see_the_same_gpus_in_the_same_order() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "5,2"}
    pair = as_pair(ServeSettings(model="m"))
    theirs = sglang_env(pair, environ, run_dir=Path("/r"), device="cuda")
    ours = cache_rank_env(environ, device="cuda")
    assert ours["CUDA_VISIBLE_DEVICES"] == theirs["CUDA_VISIBLE_DEVICES"] == "5,2"
    assert ours["CUDA_MPS_CLIENT_PRIORITY"] == "1"  # the forward pass goes first
    assert "CUDA_MPS_CLIENT_PRIORITY" not in cache_rank_env(environ, device="cpu")


def test_a_policy_that_attends_has_its_cache_rank_on_the_cpu_beside_a_gpu(
    gpus: pytest.MonkeyPatch, model_dir: Path
) -> None:
    """One GPU is enough, and what each process is started with says so."""
    given = {"model": str(model_dir), "port": 0, "selection": {"policy": "lfps"}, "cache_ranks": 1}
    for device in ("auto", "cuda"):
        settings = ServeSettings.model_validate(given | {"device": device})
        launch = resolve_launch(settings, lambda _: None)
        placement = launch.placement
        assert (launch.device, placement.model_device) == ("cuda", "cuda")
        assert (placement.host_engine, placement.engine_device) == (True, "cpu")
        alone = placed_alone(settings, cache_rank_device(settings))
        assert alone.rank_settings.flat() == launch.settings.rank_settings.flat()
    with pytest.raises(SettingsError, match=r"lfps attends on a CPU.*use --cache-ranks 1, or"):
        resolve_launch(settings.model_copy(update={"cache_ranks": 0}), lambda _: None)


def test_a_cache_rank_by_itself_takes_its_own_gpu(gpus: pytest.MonkeyPatch) -> None:
    def settings_of(**given: Any) -> ServeSettings:
        return ServeSettings.model_validate({"model": "m", **given})

    assert cache_rank_device(settings_of(device="cuda")) == "cuda"
    assert cache_rank_device(settings_of(device="cpu")) == "cpu"
    assert cache_rank_device(settings_of()) == "cuda"
    gpus.setattr(torch.cuda, "is_available", lambda: False)
    assert cache_rank_device(settings_of()) == "cpu"
    with pytest.raises(SettingsError, match="sees no CUDA device"):
        cache_rank_device(settings_of(device="cuda"))
    assert cache_rank_device(settings_of(transport="message")) == "cpu"
    gpus.setattr(torch.cuda, "is_available", lambda: True)
    assert cache_rank_device(settings_of(transport="message")) == "cuda"


def test_one_process_keeps_all_gpus() -> None:
    settings = ServeSettings(model="m", cache_ranks=0)
    given = {"SGLANG_USE_CPU_ENGINE": "1"}
    env = sglang_env(settings, given, run_dir=Path("/r"), device="cuda")
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert env["SGLANG_USE_CPU_ENGINE"] == "0"


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_groups_of_several_processes_listen_on_loopback_alone(tensor_parallel: int) -> None:
    settings = ServeSettings(model="m", cache_ranks=0, tensor_parallel=tensor_parallel)
    env = sglang_env(settings, {}, run_dir=Path("/r"), device="cuda")
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert env.get("NCCL_SOCKET_IFNAME") == ("lo" if tensor_parallel > 1 else None)
    given = {"GLOO_SOCKET_IFNAME": "dummy0"}
    env = sglang_env(settings, given, run_dir=Path("/r"), device="cuda")
    assert env["GLOO_SOCKET_IFNAME"] == "dummy0"


def test_passes_of_a_pair_are_captured_and_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    def argv(settings: ServeSettings, device: str = "cuda") -> tuple[str, ...]:
        return sglang_argv(settings, model_dir=Path("/m"), device=device, dtype="bfloat16", port=1)

    alone = ServeSettings(model="m", cache_ranks=0)
    for found in (argv(as_pair(ServeSettings(model="m"))), argv(alone)):
        assert not {"--disable-overlap-schedule", "--disable-cuda-graph"} & set(found)
    pair = as_pair(ServeSettings(model="m", device="cpu"))
    assert all("--disable-overlap-schedule" in argv(found, "cpu") for found in (alone, pair))
    monkeypatch.setenv(ONE_DEVICE_VARIABLE, APART)
    assert "--disable-overlap-schedule" in argv(alone, "cpu")
    assert "--disable-overlap-schedule" not in argv(pair, "cpu")


def test_a_layer_of_a_tensor_parallel_model_is_given_the_whole_sum() -> None:
    """SGLang leaves the all-reduce to the next layer's norm in some models, unless told not to."""

    def argv(tensor_parallel: int) -> tuple[str, ...]:
        settings = ServeSettings(model="m", cache_ranks=0, tensor_parallel=tensor_parallel)
        return sglang_argv(settings, model_dir=Path("/m"), device="cuda", dtype="bfloat16", port=1)

    flag = "--enforce-disable-flashinfer-allreduce-fusion"
    assert flag in argv(2)
    assert flag not in argv(1)


@pytest.mark.parametrize("one_device", ["", "1", "apart"])
@pytest.mark.parametrize(
    "selection",
    [
        {},
        {"index_dtype": "int8", "late_layers": 0},
        {"policy": "async_spade"},
        {"policy": "kascade", "anchors": [0, 2]},
        {"num_recent_tokens": 32},
    ],
    ids=str,
)
def test_ranks_that_are_started_apart_fill_in_the_same(
    gpus: pytest.MonkeyPatch, model_dir: Path, selection: dict[str, Any], one_device: str
) -> None:
    """The handshake compares every setting; what the user left open each decides for itself."""
    gpus.setattr(torch.cuda, "device_count", lambda: 2)
    gpus.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    memory = SimpleNamespace(total_memory=139 << 30, name="a GPU")
    gpus.setattr(torch.cuda, "get_device_properties", lambda _index: memory)
    gpus.setenv(ONE_DEVICE_VARIABLE, one_device)
    (model_dir / "control").touch()
    gpus.setenv("CUDA_MPS_PIPE_DIRECTORY", str(model_dir))
    settings = ServeSettings.model_validate(
        {"model": str(model_dir), "device": "cuda", "port": 0, "selection": selection}
    )
    launch = resolve_launch(as_pair(settings), lambda _: None)
    device = cache_rank_device(settings)
    found, found_dir = resolve_cache_rank(settings, device, lambda _: None)
    assert found_dir == launch.model_dir
    assert found.rank_settings.flat() == launch.settings.rank_settings.flat()
    if not selection:
        assert found.selection.index_dtype == "int4"
        assert found.selection.num_late == (0 if one_device == "1" else 1)


def test_a_cache_rank_of_serve_takes_what_serve_decided(model_dir: Path) -> None:
    settings = ServeSettings(model=str(model_dir), device="cuda")
    placed = settings.model_copy(update={"placement": settings.placement_on("cuda", "serve")})
    found, _ = resolve_cache_rank(placed, "cuda", lambda _: None)
    assert found == placed
