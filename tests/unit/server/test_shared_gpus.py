# SPDX-License-Identifier: Apache-2.0
"""Two processes on GPUs: refused where they would not run, with what to use instead."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.memory.one_device import ONE_DEVICE_VARIABLE
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.server.checks.shared_gpus import check_shared_gpus


def _placement(**more: Any) -> Placement:
    given = {"link": "shared", "model_device": "cuda"}
    return Placement.model_validate(given | more)


@pytest.mark.parametrize("placement", [Placement(), _placement(link="local")])
def test_others_are_not_concerned(placement: Placement) -> None:
    check_shared_gpus(placement)


def _pretend(monkeypatch: pytest.MonkeyPatch, count: int, peers: set[tuple[int, int]]) -> None:
    monkeypatch.delenv(ONE_DEVICE_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) in peers)


def test_two_gpus_need_peer_access_both_ways_and_no_mps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    both = {(0, 1), (1, 0)}
    _pretend(monkeypatch, 2, both)
    check_shared_gpus(_placement(two_gpus=True))
    for peers in (set(), {(0, 1)}, {(1, 0)}):
        _pretend(monkeypatch, 2, peers)
        with pytest.raises(SettingsError, match=r"cuda:0 and cuda:1 .* add --cache-ranks 0, or"):
            check_shared_gpus(_placement(two_gpus=True))


def test_each_tensor_parallel_rank_needs_access_to_the_gpu_of_its_own_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split = _placement(two_gpus=True, tp_size=2)
    pairs = {(0, 2), (2, 0), (1, 3), (3, 1)}
    _pretend(monkeypatch, 4, pairs)
    check_shared_gpus(split)
    _pretend(monkeypatch, 4, pairs - {(3, 1)})
    with pytest.raises(SettingsError, match="cuda:1 and cuda:3"):
        check_shared_gpus(split)


def test_several_engines_need_access_to_the_gpus_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placement = _placement(two_gpus=True, head_shards=2)
    pairs = {(a, b) for a in range(3) for b in range(3) if a != b}
    _pretend(monkeypatch, 3, pairs)
    check_shared_gpus(placement)
    _pretend(monkeypatch, 3, pairs - {(2, 1)})
    with pytest.raises(SettingsError, match="cuda:1 and cuda:2"):
        check_shared_gpus(placement)


@pytest.mark.parametrize("value", ["1", "apart"])
def test_one_gpu_needs_mps(value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ONE_DEVICE_VARIABLE, value)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    with pytest.raises(SettingsError, match="nvidia-cuda-mps-control -d"):
        check_shared_gpus(_placement())
    (tmp_path / "control").touch()
    check_shared_gpus(_placement())


def test_a_rank_and_its_pump_need_mps_and_no_second_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _pretend(monkeypatch, 1, set())
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    placement = _placement(link="message", two_gpus=True)
    with pytest.raises(SettingsError, match=r"transport=message.*nvidia-cuda-mps-control -d"):
        check_shared_gpus(placement)
    (tmp_path / "control").touch()
    check_shared_gpus(placement)
    check_shared_gpus(_placement(link="message", model_device="cpu", two_gpus=True))
