# SPDX-License-Identifier: Apache-2.0
"""The placement: what follows from its link, what is said of it, what the handshake compares."""

import pytest
from pydantic import ValidationError

from tandemkv.cache_rank.protocol.memory.one_device import ONE_DEVICE_VARIABLE
from tandemkv.cache_rank.protocol.settings.placement import (
    Placement,
    lies_on_two_gpus,
)
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings


@pytest.mark.parametrize(("link", "processes", "maps"), [("local", 0, False), ("shared", 1, True)])
def test_what_follows_from_the_link(link: str, processes: int, maps: bool) -> None:
    found = Placement.model_validate({"link": link})
    assert (found.num_cache_ranks, found.maps_memory) == (processes, maps)
    assert not found.has_far_pool
    split = Placement.model_validate({"link": link, "tp_size": 4})
    assert split.num_cache_ranks == 4 * processes


@pytest.mark.parametrize(
    ("link", "two_gpus", "far"),
    [
        ("local", False, False),
        ("local", True, False),
        ("shared", False, False),
        ("shared", True, True),
    ],
)
def test_k_v_may_lie_on_another_gpu_than_the_model(link: str, two_gpus: bool, far: bool) -> None:
    found = Placement.model_validate({"link": link, "two_gpus": two_gpus})
    assert found.has_far_pool is far
    assert ("on a GPU of its own" in found.describe()) is far


@pytest.mark.parametrize(
    ("link", "device", "value", "two_gpus"),
    [
        ("shared", "cuda", None, True),
        ("shared", "cuda", "1", False),
        ("shared", "cuda", "apart", True),
        ("shared", "cpu", None, False),
        ("shared", "cpu", "1", False),
        ("shared", "cpu", "apart", True),
        ("local", "cuda", None, False),
        ("local", "cuda", "apart", False),
    ],
)
def test_two_processes_have_a_gpu_each_unless_tests_give_them_one(
    link: str, device: str, value: str | None, two_gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ONE_DEVICE_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(ONE_DEVICE_VARIABLE, value)
    assert lies_on_two_gpus(link, device) is two_gpus


def test_it_is_told_in_one_line_with_its_reason() -> None:
    found = Placement(model_device="cuda", two_gpus=True, reason="asked for")
    text = (
        "link shared: model on cuda, cache rank in a process of its own, on a GPU of its own, in "
        "memory that both map"
    )
    assert found.describe() == f"{text}; asked for"
    split = Placement(link="local", model_device="cuda", tp_size=4)
    assert "model on 4 GPUs" in split.describe()
    both = Placement(link="shared", tp_size=2).describe()
    assert "model on 2 processes, cache rank of each in a process of its own" in both
    three = Placement(link="shared", head_shards=3)
    assert three.num_cache_ranks == three.num_shards == 3
    assert "3 cache ranks, each with its part of the KV heads, in a process" in three.describe()
    few = Placement(link="shared", tp_size=4, engines_per_rank=2)
    assert (few.num_cache_ranks, few.num_engines, few.num_shards) == (2, 4, 4)
    assert "4 processes, a cache rank for every 2 of them in a process of its own" in few.describe()
    assert found.info() == {"link": "shared", "cache_ranks": "1", "placement": found.describe()}


def test_ranks_compare_the_link_and_whether_there_are_two_gpus() -> None:
    ours = RankSettings(placement=Placement(link="shared", reason="--transport shared was given"))
    theirs = RankSettings(placement=Placement(link="shared", model_device="cuda", reason="alone"))
    assert ours.flat() == theirs.flat()
    assert ours.flat()["placement.link"] == "shared"
    apart = RankSettings(placement=Placement(link="shared", two_gpus=True))
    assert apart.flat()["placement.two_gpus"] != ours.flat()["placement.two_gpus"]
    with pytest.raises(ValidationError):
        Placement.model_validate({"link": "carrier pigeon"})
