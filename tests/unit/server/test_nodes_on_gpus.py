# SPDX-License-Identifier: Apache-2.0
"""SGLang over several hosts with GPUs: what each decides, checks and starts, on GPUs not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from placement_world import gpus as gpus
from placement_world import resolve
from timings import A100, profile_of
from tiny_model import write_model

from tandemkv.cache_rank.process import _homes as engine_side
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.memory.shared_devices import inference_homes
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.inference_rank.sglang import nodes
from tandemkv.server.checks.preflight import resolve_launch
from tandemkv.server.checks.shared_gpus import check_shared_gpus
from tandemkv.server.launch.sglang_command import sglang_argv, sglang_env
from tandemkv.server.plan import constants as constants_module
from tandemkv.server.plan.constants import write_profile
from tandemkv.server.plan.cost import H200
from tandemkv.server.settings.launch_settings import ServeSettings

MET: dict[str, Any] = {"nnodes": 2, "dist_init_addr": "127.0.0.1:7500", "tensor_parallel": 4}


@pytest.mark.parametrize("given", [{}, {"cache_ranks": 0}, {"transport": "local"}])
def test_each_gpu_keeps_its_heads(tmp_path: Path, gpus: Any, given: dict[str, Any]) -> None:
    gpus(2)  # of the four
    settings, said = resolve(tmp_path, **MET, **given)
    placement = settings.rank_settings.placement
    assert (placement.link, placement.num_cache_ranks, placement.num_nodes) == ("local", 0, 2)
    assert [list(placement.engines_of(node)) for node in (0, 1)] == [[], []]
    assert "model on 4 GPUs on 2 nodes, cache rank of each in SGLang's process" in said[0]
    reason = "--tp 4 splits the cache as well"
    if given:
        ((name, value),) = given.items()
        reason = f"--{name.replace('_', '-')} {value} was given"
    assert said[0].endswith(f"; {reason}")


def test_a_launch_on_gpus_goes_through_all_checks(
    tmp_path: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = MET | {"tensor_parallel": 2, "dist_init_addr": "127.0.0.1:0", "port": 0}
    settings = ServeSettings.model_validate({"model": str(write_model(tmp_path))} | given)
    launch = resolve_launch(settings, lambda _: None)
    assert (launch.device, launch.placement.link, launch.placement.num_nodes) == (
        "cuda",
        "local",
        2,
    )


@pytest.mark.parametrize(
    ("given", "num_here"),
    [({"cache_ranks": 4}, 4), ({"cache_ranks": 8}, 6), ({"transport": "shared"}, 4)],
)
def test_cache_ranks_have_gpus_of_their_own_on_each_host(
    tmp_path: Path, gpus: Any, given: dict[str, Any], num_here: int
) -> None:
    gpus(num_here)
    settings, said = resolve(tmp_path, **MET, **given)
    placement = settings.rank_settings.placement
    num_engines = 2 * (num_here - 2)
    assert (placement.link, placement.tp_per_node) == ("shared", 2)
    assert [len(placement.engines_of(node)) for node in (0, 1)] == [num_engines // 2] * 2
    assert "on a GPU of its own, in memory that both map" in said[0]
    check_shared_gpus(placement)
    gpus(num_here - 1)
    with pytest.raises(SettingsError, match=rf"needs {num_here} GPUs on each of 2 nodes"):
        resolve(tmp_path, **MET, **given)


def test_one_cache_rank_for_several_gpus_is_refused_in_words(tmp_path: Path, gpus: Any) -> None:
    gpus(8)
    with pytest.raises(SettingsError, match=r"cache_ranks=2 and .* use --cache-ranks 4 or 0"):
        resolve(tmp_path, **MET, cache_ranks=2)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_both_ranks_of_a_host_count_its_gpus_alike(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, num_engines: int
) -> None:
    """Numbers of cache ranks are those of all hosts, GPUs those of one."""
    gpus(2 + 2 * num_engines)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    placement = Placement(
        model_device="cuda", tp_size=4, num_nodes=2, head_shards=num_engines, two_gpus=True
    )
    for node in (0, 1):
        here = []
        for rank in placement.cache_ranks_of(node):
            ours = engine_side("cuda", placement, rank)
            theirs = inference_homes(ours.inference, placement.tp_per_node, num_engines)
            assert theirs.with_engine(rank % num_engines).engine == ours.engine == ours.here
            assert theirs.pools == ours.pools
            here.append((ours.inference.index, ours.here.index))
        assert here == [(n // num_engines, 2 + n) for n in range(2 * num_engines)]


def test_a_host_needs_the_gpus_of_its_part(tmp_path: Path, gpus: Any) -> None:
    gpus(1)
    with pytest.raises(SettingsError, match=r"needs 2 GPUs on each of 2 nodes, 1 seen"):
        resolve(tmp_path, **MET)


def test_a_gpu_holds_its_part_of_the_weights_and_of_the_cache(tmp_path: Path, gpus: Any) -> None:
    """K/V of 512K tokens take 72 GiB, of which each of four GPUs has a quarter."""
    gpus(2, gib=40)
    resolve(tmp_path, **MET)
    with pytest.raises(SettingsError, match=r"each inference GPU needs .* GiB usable"):
        resolve(tmp_path, **MET | {"tensor_parallel": 2})


def test_hosts_of_which_one_has_a_profile_decide_the_same(
    tmp_path: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each decides is compared, and one that differs would be refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants_module, "visible_gpu", lambda: A100)
    gpus(2)
    without, said = resolve(tmp_path, **MET)
    write_profile(profile_of(replace(H200, attention_bandwidth=H200.attention_bandwidth / 4)))
    measured, _ = resolve(tmp_path, **MET)
    assert measured.rank_settings.flat() == without.rank_settings.flat()
    assert without.selection.dense_batch_tokens is not None
    assert said[1].endswith("selecting pays beyond, by constants of one H200")
    assert "so no profile of a machine is used; what the network adds" in said[2]
    of_one_host = MET | {"nnodes": 1, "dist_init_addr": None, "tensor_parallel": 2}
    alone, _ = resolve(tmp_path, **of_one_host)
    write_profile(profile_of(H200))
    again, _ = resolve(tmp_path, **of_one_host)
    assert alone.selection.dense_tokens != again.selection.dense_tokens


def test_sglang_is_told_of_gpus_on_several_hosts(tmp_path: Path) -> None:
    settings = ServeSettings(model="m", device="cuda", cache_ranks=0, **MET)
    flag = "--disable-custom-all-reduce"
    for device, has_flag in (("cuda", True), ("cpu", False)):
        argv = sglang_argv(settings, model_dir=tmp_path, device=device, dtype="bfloat16", port=1)
        assert (flag in argv) == has_flag
    alone = ServeSettings(model="m", cache_ranks=0, tensor_parallel=2)
    assert flag not in sglang_argv(
        alone, model_dir=tmp_path, device="cuda", dtype="bfloat16", port=1
    )


@pytest.mark.parametrize(
    ("given", "nccl"),
    [
        ({}, "=lo"),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "=eth7"),
        ({"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "ib0"}, "ib0"),
    ],
)
def test_nccl_takes_the_interface_of_gloo(tmp_path: Path, given: dict[str, str], nccl: str) -> None:
    settings = ServeSettings(model="m", device="cuda", cache_ranks=0, **MET)
    env = sglang_env(settings, given, run_dir=tmp_path, device="cuda")
    assert env["GLOO_SOCKET_IFNAME"] == given.get("GLOO_SOCKET_IFNAME", "lo")
    assert env["NCCL_SOCKET_IFNAME"] == nccl


def test_hosts_have_to_have_gpus_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang captures steps of as many sizes as go with a GPU's memory, and each has sums."""
    told: list[dict[str, str]] = []
    monkeypatch.setattr(nodes, "check_equal", lambda _, own: told.append(own))
    monkeypatch.setattr(nodes.sglang_versions, "tensor_rank", lambda: 0)
    for name in ("NVIDIA H100", "NVIDIA H200"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        nodes.check_settings(RankSettings(), SimpleNamespace(device="cuda"))
    assert {name for name in told[0] if told[0][name] != told[1][name]} == {"gpu"}
