# SPDX-License-Identifier: Apache-2.0
"""Several cache ranks of one inference rank: where they go, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from placement_world import gpus as gpus
from placement_world import resolve

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.one_device import ONE_DEVICE_VARIABLE


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


def test_by_messages_gpus_do_not_share_the_heads(tmp_path: Path, gpus: Any) -> None:
    gpus(4)
    with pytest.raises(SettingsError, match="between GPUs transport=message has one cache rank"):
        resolve(tmp_path, cache_ranks=3, transport="message")


def test_one_device_stands_for_several_gpus(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(ONE_DEVICE_VARIABLE, "apart")
    selection = {"budget_tokens": 2048}
    settings, _ = resolve(tmp_path, "cpu", cache_ranks=3, selection=selection)
    placement = settings.rank_settings.placement
    assert (placement.num_sharing, placement.has_far_pool) == (3, True)
