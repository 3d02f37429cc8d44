# SPDX-License-Identifier: Apache-2.0
"""Whose the memory is that outlives an inference rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_model import write_model

from tandemkv.cache_rank.protocol.errors import AlreadyServedError
from tandemkv.cache_rank.protocol.heartbeat import StatusServer
from tandemkv.cache_rank.protocol.memory.descriptor_holder import DescriptorHolder
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    RUN_DIR_VARIABLE,
    SETTINGS_VARIABLE,
    RankSettings,
)
from tandemkv.inference_rank.links import pool as pool_module


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


def test_memory_of_a_server_that_lives_is_left_alone(run_dir: RunDir, tmp_path: Path) -> None:
    """A second one may be started while the first one starts, hangs, or is too busy to answer."""
    model_dir = write_model(tmp_path / "model")

    def make() -> MappedTensors:
        pool = SimpleNamespace(size=64, page_size=1, dtype=torch.float32, device="cpu")
        config = SimpleNamespace(model_path=model_dir, dtype=torch.float32)
        return pool_module._kept_for(pool, config, torch.zeros(3, 32, dtype=torch.int32))[1]

    with closing(make()) as first:
        first["req_to_token"].fill_(7)
        with closing(StatusServer(run_dir.inference_socket, status=SimpleNamespace)):  # type: ignore[arg-type]
            with pytest.raises(AlreadyServedError, match="a live inference rank uses its memory"):
                make()
            assert first["req_to_token"].eq(7).all()
        with closing(make()) as after_it:
            assert not after_it["req_to_token"].any()
            assert not first["req_to_token"].any(), "it is the same memory"
