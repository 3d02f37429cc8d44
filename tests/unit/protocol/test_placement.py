# SPDX-License-Identifier: Apache-2.0
"""The placement: what follows from its link, what is said of it, what the handshake compares."""

import pytest
from pydantic import ValidationError

from tandemkv.cache_rank.protocol.placement import Placement
from tandemkv.cache_rank.protocol.settings import RankSettings


@pytest.mark.parametrize(
    ("link", "processes", "peer", "maps", "whole"),
    [
        ("local", 0, False, False, True),
        ("peer", 0, True, False, False),
        ("shared", 1, False, True, True),
    ],
)
def test_what_follows_from_the_link(
    link: str, processes: int, peer: bool, maps: bool, whole: bool
) -> None:
    found = Placement.model_validate({"link": link})
    assert (found.num_cache_ranks, found.has_peer_gpu) == (processes, peer)
    assert (found.maps_memory, found.attends_to_pool) == (maps, whole)


def test_it_is_told_in_one_line_with_its_reason() -> None:
    found = Placement(link="peer", model_device="cuda", engine_device="cuda", reason="asked for")
    text = "link peer: model on cuda, cache rank driven by SGLang's process, on a GPU of its own"
    assert found.describe() == f"{text}; asked for"
    split = Placement(link="local", model_device="cuda", engine_device="cuda", tp_size=4)
    assert "model on 4 GPUs" in split.describe()
    assert found.info() == {"link": "peer", "cache_ranks": "0", "placement": found.describe()}


def test_ranks_compare_the_link_alone() -> None:
    ours = RankSettings(placement=Placement(link="shared", reason="--transport shared was given"))
    theirs = RankSettings(placement=Placement(link="shared", engine_device="cuda", reason="alone"))
    assert ours.flat() == theirs.flat()
    assert ours.flat()["placement.link"] == "shared"
    with pytest.raises(ValidationError):
        Placement.model_validate({"link": "carrier pigeon"})
