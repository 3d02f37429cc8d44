# SPDX-License-Identifier: Apache-2.0
"""Two ranks on two GPUs: what the launcher decides, without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import write_model

from tandemkv.cache_rank import device_memory
from tandemkv.cache_rank.protocol.connect import check_transport
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.one_device import ONE_DEVICE_VARIABLE
from tandemkv.cache_rank.protocol.settings import RankSettings
from tandemkv.server.devices import as_pair, resolve_device, resolve_transport
from tandemkv.server.preflight import resolve_launch
from tandemkv.server.settings import ServeSettings
from tandemkv.server.sglang_command import cache_rank_env, sglang_argv, sglang_env

MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=4,
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    max_context=128,
    dtype="bfloat16",
    model_hash="aa",
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return monkeypatch


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def test_a_cache_rank_needs_a_gpu_of_its_own(gpus: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"needs 2 GPUs, 1 seen.*--cache-ranks 0"):
        resolve_device("cuda", cache_ranks=1)
    assert resolve_device("auto", cache_ranks=1) == "cpu"
    assert resolve_device("cuda", cache_ranks=0) == "cuda"
    assert resolve_device("cuda", cache_ranks=1, num_ranks_here=1) == "cuda", (
        "one rank of a pair, by itself"
    )
    gpus.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda", cache_ranks=1) == resolve_device("auto", cache_ranks=1) == "cuda"


def test_one_gpu_stands_for_two_where_tests_ask_for_it(
    gpus: pytest.MonkeyPatch, model_dir: Path
) -> None:
    given: dict[str, Any] = {"model": str(model_dir), "cache_ranks": 1, "port": 0}
    peer = ServeSettings.model_validate(given | {"exchange": {"transport": "peer"}})
    pair = ServeSettings.model_validate(given)
    said: list[str] = []
    memory = SimpleNamespace(total_memory=139 << 30)
    gpus.setattr(torch.cuda, "get_device_properties", lambda _index: memory)
    gpus.delenv(ONE_DEVICE_VARIABLE, raising=False)
    for settings in (peer, pair):
        on_gpu = settings.model_copy(update={"device": "cuda"})
        with pytest.raises(SettingsError, match=r"needs 2 GPUs, 1 seen"):
            resolve_launch(on_gpu, said.append)
    gpus.setenv(ONE_DEVICE_VARIABLE, "1")
    for device in ("cuda", "auto"):
        launch = resolve_launch(peer.model_copy(update={"device": device}), said.append)
        assert (launch.device, launch.settings.transport) == ("cuda", "peer")
        environ = {ONE_DEVICE_VARIABLE: "1"}
        env = sglang_env(launch.settings, environ, run_dir=model_dir, device=launch.device)
        assert env[ONE_DEVICE_VARIABLE] == "1"
    with pytest.raises(SettingsError, match=r"needs 2 GPUs, 1 seen"):
        resolve_launch(pair.model_copy(update={"device": "cuda"}), said.append)


def test_the_device_decides_the_data_plane_unless_given() -> None:
    settings = as_pair(ServeSettings(model="m"))
    assert resolve_transport(settings, "cuda").transport == "nccl"
    assert resolve_transport(settings, "cpu").transport == "shared"
    shared = ServeSettings.model_validate(
        {"model": "m", "cache_ranks": 1, "exchange": {"transport": "shared"}}
    )
    assert resolve_transport(shared, "cpu") == shared
    with pytest.raises(SettingsError, match=r"transport=shared.*cuda; use --transport nccl"):
        resolve_transport(shared, "cuda")
    assert resolve_transport(ServeSettings(model="m", cache_ranks=0), "cuda").transport == "local"
    given = ServeSettings.model_validate(
        {"model": "m", "cache_ranks": 1, "exchange": {"transport": "gloo"}}
    )
    assert resolve_transport(given, "cpu") == given
    with pytest.raises(SettingsError, match=r"transport=gloo.*cuda; use --transport nccl"):
        resolve_transport(given, "cuda")
    with pytest.raises(SettingsError, match=r"transport=nccl.*cpu; use --transport gloo"):
        check_transport("nccl", torch.device("cpu"))


@pytest.mark.parametrize(("visible", "places"), [(None, ("0", "1")), ("5, 2,7", ("5", "2"))])
def test_each_rank_sees_one_gpu(visible: str | None, places: tuple[str, str]) -> None:
    settings = resolve_transport(as_pair(ServeSettings(model="m")), "cuda")
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    ours = sglang_env(settings, environ, run_dir=Path("/r"), device="cuda")
    theirs = cache_rank_env(environ, device="cuda", inference_device="cuda")
    for env, place in zip((ours, theirs), places, strict=True):
        assert env["CUDA_VISIBLE_DEVICES"] == place
        assert env["NCCL_SOCKET_IFNAME"] == "lo"
        assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_one_process_keeps_all_gpus() -> None:
    settings = ServeSettings(model="m", cache_ranks=0)
    env = sglang_env(settings, {}, run_dir=Path("/r"), device="cuda")
    assert "CUDA_VISIBLE_DEVICES" not in env


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_groups_of_several_processes_listen_on_loopback_alone(tensor_parallel: int) -> None:
    settings = ServeSettings(model="m", cache_ranks=0, tensor_parallel=tensor_parallel)
    env = sglang_env(settings, {}, run_dir=Path("/r"), device="cuda")
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert env.get("NCCL_SOCKET_IFNAME") == ("lo" if tensor_parallel > 1 else None)
    given = {"GLOO_SOCKET_IFNAME": "dummy0"}
    env = sglang_env(settings, given, run_dir=Path("/r"), device="cuda")
    assert env["GLOO_SOCKET_IFNAME"] == "dummy0"


def test_passes_of_a_pair_are_neither_captured_nor_overlapped() -> None:
    def argv(settings: ServeSettings) -> tuple[str, ...]:
        return sglang_argv(settings, model_dir=Path("/m"), device="cuda", dtype="bfloat16", port=1)

    pair = argv(resolve_transport(as_pair(ServeSettings(model="m")), "cuda"))
    assert {"--disable-cuda-graph", "--disable-overlap-schedule"} <= set(pair)
    assert pair[pair.index("--page-size") + 1] == "1"
    alone = argv(ServeSettings(model="m", cache_ranks=0))
    assert "--disable-cuda-graph" not in alone


def test_too_little_memory_of_the_gpu_is_told_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = device_memory.RESERVED_BYTES + (1 << 20)
    monkeypatch.setattr(device_memory, "free_bytes", lambda: free)
    per_token = 2 * 2 * 8 * 2 * 4
    fitting = (1 << 20) // per_token
    device_memory.check_device_memory(MODEL, RankSettings(), num_slots=fitting)
    with pytest.raises(SettingsError, match=rf"at most {fitting} tokens fit \(--cache-tokens\)"):
        device_memory.check_device_memory(MODEL, RankSettings(), num_slots=fitting + 1)
