# SPDX-License-Identifier: Apache-2.0
"""Whose the memory is that outlives an inference rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import write_model

from tandemkv.cache_rank.protocol.errors import AlreadyServedError
from tandemkv.cache_rank.protocol.heartbeat import StatusServer
from tandemkv.cache_rank.protocol.memory.descriptor_holder import DescriptorHolder
from tandemkv.cache_rank.protocol.memory.descriptor_socket import take_held
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    RUN_DIR_VARIABLE,
    SETTINGS_VARIABLE,
    RankSettings,
)
from tandemkv.inference_rank.links import pool as pool_module
from tandemkv.inference_rank.links.connection import KEPT


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """One in which a launcher holds memory."""
    found = RunDir.create(tmp_path / "run")
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(found.path))
    monkeypatch.setenv(SETTINGS_VARIABLE, RankSettings().model_dump_json())
    monkeypatch.setattr(pool_module.sglang_versions, "tensor_rank", lambda: 0)
    monkeypatch.setattr(pool_module.sglang_versions, "tensor_size", lambda: 1)
    with closing(DescriptorHolder(found.holder_socket, found.token)):
        yield found


@pytest.fixture
def make(run_dir: RunDir, tmp_path: Path) -> Callable[..., MappedTensors]:
    """Return what an inference rank makes, or is given, with a pool of so many tokens."""
    model_dir = write_model(tmp_path / "model")

    def made(size: int = 64) -> MappedTensors:
        pool = SimpleNamespace(size=size, page_size=1, dtype=torch.float32, device="cpu")
        config = SimpleNamespace(model_path=model_dir, dtype=torch.float32)
        return pool_module._kept_for(pool, config, torch.zeros(3, 32, dtype=torch.int32))[1]

    return made


def test_memory_of_other_settings_is_let_go_of_before_more_is_made(
    run_dir: RunDir, make: Callable[..., MappedTensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may not be as much for both: K/V take most of what a host or a GPU has."""
    make().close()
    held: list[int] = []
    allocate = MappedTensors.allocate

    def look(self: MappedTensors, *given: Any) -> torch.Tensor:
        with closing(take_held(run_dir.holder_socket, token=run_dir.token, group=KEPT)) as found:
            held.append(len(found.specs))
        return allocate(self, *given)

    monkeypatch.setattr(MappedTensors, "allocate", look)
    make(128).close()
    assert held
    assert not any(held)


def test_memory_of_a_server_that_lives_is_left_alone(
    run_dir: RunDir, make: Callable[..., MappedTensors]
) -> None:
    """A second one may be started while the first one starts, hangs, or is too busy to answer."""
    with closing(make()) as first:
        first["req_to_token"].fill_(7)
        with closing(StatusServer(run_dir.inference_socket, status=SimpleNamespace)):  # type: ignore[arg-type]
            with pytest.raises(AlreadyServedError, match="a live inference rank uses its memory"):
                make()
            assert first["req_to_token"].eq(7).all()
        with closing(make()) as after_it:
            assert not after_it["req_to_token"].any()
            assert not first["req_to_token"].any(), "it is the same memory"
