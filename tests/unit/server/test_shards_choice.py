# SPDX-License-Identifier: Apache-2.0
"""Several cache ranks of one inference rank: where they go, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from placement_world import gpus as gpus
from placement_world import resolve

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.memory.one_device import ONE_DEVICE_VARIABLE


def test_cache_ranks_share_the_heads_of_one_rank_on_a_cpu(tmp_path: Path) -> None:
    settings, said = resolve(tmp_path, "cpu", cache_ranks=4, selection={"budget_tokens": 2048})
    placement = settings.rank_settings.placement
    assert (placement.head_shards, placement.num_cache_ranks, placement.tp_size) == (4, 4, 1)
    assert settings.cache_ranks == 4
    assert "4 cache ranks, each with its part of the KV heads" in said[0]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_cache_ranks_share_the_heads_of_one_rank_on_gpus(
    tmp_path: Path, gpus: Any, tp_size: int
) -> None:
    """Each has a GPU of its own, behind those of the model; heads need not divide evenly."""
    gpus(4 * tp_size)
    given = {"tensor_parallel": tp_size, "cache_ranks": 3 * tp_size}
    settings, said = resolve(tmp_path, **given)
    placement = settings.rank_settings.placement
    assert (placement.head_shards, placement.num_cache_ranks) == (3, 3 * tp_size)
    assert placement.two_gpus
    assert placement.num_sharing == 3
    assert "each with its part of the KV heads, in a process of its own, on a GPU" in said[0]
    assert settings.selection.num_late == 1
    gpus(4 * tp_size - 1)
    with pytest.raises(SettingsError, match=f"needs {4 * tp_size} GPUs, {4 * tp_size - 1} seen"):
        resolve(tmp_path, **given)
    gpus(32)
    with pytest.raises(SettingsError, match=r"more than the .* KV heads"):
        resolve(tmp_path, tensor_parallel=tp_size, cache_ranks=16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cache_ranks": 9}, "more than the 8 KV heads of .*; use --cache-ranks 8 at most"),
        ({"cache_ranks": 2, "selection": {"policy": "sfi"}}, "policy=sfi .*use --cache-ranks 1"),
        ({"cache_ranks": 2, "selection": {"policy": "sync_kv"}}, "policy=sync_kv does not declare"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    selection = {"budget_tokens": 2048, **given.get("selection", {})}
    with pytest.raises(SettingsError, match=message):
        resolve(tmp_path, "cpu", **given | {"selection": selection})


@pytest.mark.parametrize("tp_size", [1, 2])
def test_by_messages_each_of_several_has_a_gpu_of_its_own(
    tmp_path: Path, gpus: Any, tp_size: int
) -> None:
    """On this host behind those of the model; on others they are not counted."""
    given = {"tensor_parallel": tp_size, "cache_ranks": 3 * tp_size, "transport": "message"}
    gpus(4 * tp_size)
    settings, said = resolve(tmp_path, **given)
    placement = settings.rank_settings.placement
    assert (placement.head_shards, placement.num_cache_ranks) == (3, 3 * tp_size)
    assert (placement.num_sharing, placement.two_gpus) == (1, True), "each has a pool of its own"
    assert "each with its part of the KV heads, in a process of its own, met by messages" in said[0]
    gpus(4 * tp_size - 1)
    with pytest.raises(SettingsError, match=f"needs {4 * tp_size} GPUs, {4 * tp_size - 1} seen"):
        resolve(tmp_path, **given)
    gpus(tp_size)
    addresses = ",".join(f"tcp://10.0.0.{n}:7400" for n in range(3 * tp_size))
    far = {"cache_rank_address": addresses, "link_keys": "keys", "tensor_parallel": tp_size}
    settings, _ = resolve(tmp_path, **far)
    assert settings.rank_settings.placement.head_shards == 3
    gpus(32)
    for more in (given | {"cache_ranks": 16}, far | {"selection": {"policy": "sfi"}}):
        with pytest.raises(SettingsError, match=r"more than the .* KV heads|policy=sfi"):
            resolve(tmp_path, **more)


def test_by_messages_the_model_s_gpu_has_all_k_and_v(tmp_path: Path, gpus: Any) -> None:
    """So several cache ranks give no room there; those that map memory do."""
    gpus(4, gib=80)
    assert resolve(tmp_path, cache_ranks=3, transport="shared")
    with pytest.raises(SettingsError, match="GiB"):
        resolve(tmp_path, cache_ranks=3, transport="message")


def test_one_device_stands_for_several_gpus(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(ONE_DEVICE_VARIABLE, "apart")
    selection = {"budget_tokens": 2048}
    settings, _ = resolve(tmp_path, "cpu", cache_ranks=3, selection=selection)
    placement = settings.rank_settings.placement
    assert (placement.num_sharing, placement.has_far_pool) == (3, True)
