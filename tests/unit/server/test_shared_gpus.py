# SPDX-License-Identifier: Apache-2.0
"""Two processes on GPUs: refused where they would not run, with what to use instead."""

from pathlib import Path
from typing import Any

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.one_device import ONE_DEVICE_VARIABLE
from tandemkv.cache_rank.protocol.placement import Placement
from tandemkv.server.shared_gpus import check_shared_gpus


def _placement(**more: Any) -> Placement:
    given = {"link": "shared", "model_device": "cuda", "engine_device": "cuda"}
    return Placement.model_validate(given | more)


@pytest.mark.parametrize(
    "placement",
    [Placement(), _placement(link="local"), _placement(link="peer")],
)
def test_others_are_not_concerned(placement: Placement) -> None:
    check_shared_gpus(placement, {})


def test_two_gpus_are_refused_with_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ONE_DEVICE_VARIABLE, raising=False)
    with pytest.raises(SettingsError, match=r"--cache-ranks 0, or --transport peer"):
        check_shared_gpus(_placement(), {})


def test_one_gpu_needs_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ONE_DEVICE_VARIABLE, "1")
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    with pytest.raises(SettingsError, match="nvidia-cuda-mps-control -d"):
        check_shared_gpus(_placement(), environ)
    (tmp_path / "control").touch()
    check_shared_gpus(_placement(), environ)
