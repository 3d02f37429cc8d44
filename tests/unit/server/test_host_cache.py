# SPDX-License-Identifier: Apache-2.0
"""A model on a GPU with its cache rank in host memory: what the launcher decides, without a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_model

from tandemkv.cache_rank import process
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings import RankSettings
from tandemkv.server import cores, preflight
from tandemkv.server.child_process import ChildSpec
from tandemkv.server.devices import (
    as_pair,
    cache_rank_device,
    choose_cache_device,
    resolve_cache_device,
    resolve_device,
    resolve_transport,
)
from tandemkv.server.inference_process import inference_rank_command
from tandemkv.server.preflight import ResolvedLaunch, resolve_launch
from tandemkv.server.serve import make_plan, run_cache_rank_process
from tandemkv.server.settings import ServeSettings
from tandemkv.server.settings_sources import load_settings, to_yaml

HOST: dict[str, Any] = {"device": "cuda", "cache_device": "cpu", "port": 0}
LFPS = {"policy": "lfps"}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that there are some GPUs; one, at first."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    pretend(1)
    return pretend


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


def settings_of(**given: Any) -> ServeSettings:
    return ServeSettings.model_validate({"model": "m", **given})


def decide(device: str, **given: Any) -> tuple[ServeSettings, list[str]]:
    said: list[str] = []
    return resolve_cache_device(settings_of(**given), device, said.append), said


def launch_of(model_dir: Path, said: list[str] | None = None, **given: Any) -> ResolvedLaunch:
    settings = settings_of(**HOST | {"model": str(model_dir)} | given)
    return resolve_launch(settings, [].append if said is None else said.append)


@pytest.mark.parametrize(
    ("wanted", "device", "devices", "found"),
    [
        ("auto", "cuda", ("cpu", "cuda"), "cuda"),
        ("auto", "cuda", ("cpu",), "cpu"),
        ("auto", "cpu", ("cpu",), "cpu"),
        ("auto", "cpu", ("cuda",), "cpu"),
        ("auto", "auto", ("cpu", "cuda"), "auto"),
        ("auto", "auto", ("cpu",), "cpu"),
        ("cpu", "cuda", ("cpu", "cuda"), "cpu"),
        ("cuda", "cuda", ("cpu",), "cuda"),
    ],
)
def test_auto_follows_the_model_unless_the_policy_cannot(
    wanted: str, device: str, devices: tuple[str, ...], found: str
) -> None:
    assert choose_cache_device(wanted, device, devices) == found


def test_one_gpu_is_enough(gpus: Any) -> None:
    for device in ("cuda", "auto"):
        assert resolve_device(device, cache_ranks=1, cache_device="cpu") == "cuda"
    with pytest.raises(SettingsError, match=r"needs 2 GPUs, 1 seen.*--cache-device cpu"):
        resolve_device("cuda", cache_ranks=1)
    gpus(0)
    assert resolve_device("auto", cache_ranks=1, cache_device="cpu") == "cpu"
    with pytest.raises(SettingsError, match="sees no CUDA device"):
        resolve_device("cuda", cache_ranks=1, cache_device="cpu")


def test_what_is_left_open_is_decided_and_told() -> None:
    settings, said = decide("cuda", cache_device="cpu")
    assert (settings.cache_device, settings.cache_ranks) == ("cpu", 1)
    assert said == [
        "cache rank in a process of its own, K/V in host memory: cache_device=cpu",
    ]
    settings, said = decide("cuda", selection=LFPS)
    assert (settings.cache_device, settings.cache_ranks) == ("cpu", 1)
    assert said[0].endswith("host memory: policy=lfps runs on cpu")
    assert decide("cuda", selection=LFPS, cache_ranks=1)[1] == said
    assert decide("cuda", cache_device="cpu", cache_ranks=1)[1] == []


def test_what_was_there_before_stays() -> None:
    for device in ("cpu", "cuda"):
        settings, said = decide(device)
        assert (settings.cache_device, settings.cache_ranks, said) == (device, None, [])
    for given in ({"cache_ranks": 0}, {"cache_ranks": 1, "exchange": {"transport": "peer"}}):
        assert decide("cuda", **given)[0] == settings_of(cache_device="cuda", **given)
    assert decide("cpu", cache_device="cpu", cache_ranks=0)[0].cache_ranks == 0
    assert decide("cpu", selection=LFPS)[0].cache_ranks is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"cache_device": "cpu", "cache_ranks": 0},
            r"cache_ranks=0 .* but cache_device=cpu; use --cache-ranks 1, or leave it out",
        ),
        ({"cache_ranks": 0, "selection": LFPS}, "cache_ranks=0 .* but policy=lfps runs on cpu"),
        (
            {"cache_device": "cpu", "exchange": {"transport": "peer"}},
            "transport=peer .* cache_device=cpu; use --transport gloo, or leave it out",
        ),
        (
            {"cache_device": "cpu", "cache_ranks": 1, "exchange": {"transport": "nccl"}},
            "transport=nccl .* use --transport gloo, or leave it out",
        ),
        ({"cache_device": "cpu", "exchange": {"transport": "local"}}, "transport=local"),
        ({"cache_device": "cpu", "tensor_parallel": 2}, r"tensor_parallel=2 .* use --tp 1"),
        (
            {"cache_device": "cuda", "cache_ranks": 1, "selection": LFPS},
            "policy=lfps does not run on cuda; use --cache-device cpu",
        ),
    ],
)
def test_contradictions_say_what_to_do(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        decide("cuda", **given)


def test_a_cache_on_a_gpu_needs_the_model_there() -> None:
    with pytest.raises(ValueError, match=r"cache_device=cuda .*; use --cache-device cpu, or"):
        settings_of(device="cpu", cache_device="cuda")
    with pytest.raises(SettingsError, match="rank is on cpu; use --cache-device cpu"):
        decide("cpu", cache_device="cuda")


def test_the_devices_of_both_ranks_decide_the_data_plane() -> None:
    beside = as_pair(settings_of(cache_device="cpu"))
    assert resolve_transport(beside, "cuda").transport == "gloo"
    assert resolve_transport(as_pair(settings_of(cache_device="cuda")), "cuda").transport == "nccl"
    given = settings_of(cache_device="cpu", cache_ranks=1, exchange={"transport": "gloo"})
    assert resolve_transport(given, "cuda") == given
    given = settings_of(cache_device="cpu", cache_ranks=1, exchange={"transport": "nccl"})
    with pytest.raises(SettingsError, match=r"transport=nccl .* on cuda .* on cpu; use .* gloo$"):
        resolve_transport(given, "cuda")


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    "given", [{}, {"cache_ranks": 1}, {"exchange": {"transport": "gloo"}}], ids=str
)
def test_the_plan_of_a_launch(
    given: dict[str, Any], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(cores, "_quota", lambda: None)
    launch = launch_of(model_dir, **given)
    assert (launch.device, launch.settings.cache_device, launch.spec.dtype) == (
        "cuda", "cpu", "bfloat16",
    )  # fmt: skip
    plan = make_plan(launch, RunDir.create(tmp_path / "run"))
    line = " ".join(plan.sglang.argv)
    for part in (
        "--device cuda", "--page-size 1", "--disable-cuda-graph", "--disable-overlap-schedule",
    ):  # fmt: skip
        assert part in line
    assert "--tp-size" not in line
    ours, theirs = plan.sglang.env, environment(plan.cache_rank)
    assert (ours["CUDA_VISIBLE_DEVICES"], theirs["CUDA_VISIBLE_DEVICES"]) == ("3", "")
    assert "OMP_NUM_THREADS" not in ours
    assert theirs["OMP_NUM_THREADS"] == "14"
    assert "NCCL_SOCKET_IFNAME" not in ours
    assert "SGLANG_USE_CPU_ENGINE" not in ours


def environment(child: ChildSpec | None) -> dict[str, str]:
    assert child is not None
    return dict(child.env)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("num_cores", "given", "threads"), [(2, None, "1"), (8, "3", "3")])
def test_the_cache_rank_leaves_cores_and_a_given_number_stays(
    num_cores: int,
    given: str | None,
    threads: str,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(num_cores))
    monkeypatch.setattr(cores, "_quota", lambda: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    plan = make_plan(launch_of(model_dir), RunDir.create(tmp_path / "run"))
    assert environment(plan.cache_rank)["OMP_NUM_THREADS"] == threads


def test_both_ranks_derive_the_same_from_one_file(
    gpus: Any, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by `serve` for its cache rank, or by hand for both; the cache rank sees no GPU."""
    ran: list[dict[str, Any]] = []
    monkeypatch.setattr(process, "run_cache_rank", lambda **given: ran.append(given))
    by_hand = settings_of(**HOST | {"model": str(model_dir)})
    open_ones = settings_of(model=str(model_dir), port=0, selection=LFPS)
    for number, settings in enumerate((by_hand, open_ones)):
        gpus(1)
        launch = resolve_launch(as_pair(settings), lambda _: None, num_ranks_here=1)
        run_dir = RunDir.create(tmp_path / f"run-{number}")
        argv, env = inference_rank_command(launch, run_dir, {})
        assert argv[argv.index("--device") + 1] == "cuda"
        (tmp_path / "by-hand.yaml").write_text(to_yaml(settings))
        written = make_plan(launch, run_dir).cache_rank
        assert written is not None
        gpus(0)
        files = [Path(written.argv[-1])]
        if number == 0:  # by hand somebody has to say that the inference rank has a GPU
            files.append(tmp_path / "by-hand.yaml")
        for config in files:
            run_cache_rank_process(load_settings({}, {}, config), run_dir.path)
            assert ran[-1]["device"] == "cpu"
            assert ran[-1]["settings"].flat() == (
                RankSettings.model_validate_json(env["TANDEMKV_SETTINGS"]).flat()
            )
    assert len(ran) == 3


def test_a_cache_rank_by_itself_takes_its_own_gpu(gpus: Any) -> None:
    assert cache_rank_device(settings_of(device="cuda")) == "cuda"
    assert cache_rank_device(settings_of(cache_device="cuda")) == "cuda"
    assert cache_rank_device(settings_of(device="cpu")) == "cpu"
    assert cache_rank_device(settings_of()) == "cuda"
    gpus(0)
    assert cache_rank_device(settings_of()) == "cpu"
    with pytest.raises(SettingsError, match="sees no CUDA device"):
        cache_rank_device(settings_of(cache_device="cuda"))


@pytest.mark.usefixtures("gpus")
def test_the_cache_counts_as_host_memory_where_it_is_made(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 4 << 30)
    # 2 (K, V) x 4 layers x 2 heads x 8 x 2 bytes = 256 bytes a token: 2^23 tokens are 2 GiB.
    large = {"cache": {"capacity_tokens": 1 << 23}}
    with pytest.raises(SettingsError) as caught:
        launch_of(model_dir, **large)
    assert "(cache 2.00 GiB + processes 3.00 GiB), available 4.00 GiB; --cache-tokens 4" in str(
        caught.value
    )
    settings = settings_of(**HOST | large | {"model": str(model_dir), "cache_ranks": 1})
    resolve_launch(settings, lambda _: None, num_ranks_here=1)
    launch_of(model_dir, cache={"capacity_tokens": 1 << 20})


@pytest.mark.usefixtures("gpus")
def test_a_policy_that_needs_a_process_and_has_one_gpu_is_shown_the_host(model_dir: Path) -> None:
    selection = {"policy": "quest"}
    with pytest.raises(SettingsError, match=r"a second GPU; add --cache-device cpu"):
        launch_of(model_dir, cache_device="auto", selection=selection)
    said: list[str] = []
    assert launch_of(model_dir, said, selection=selection).settings.transport == "gloo"
    assert said == ["cache rank in a process of its own, K/V in host memory: cache_device=cpu"]
