# SPDX-License-Identifier: Apache-2.0
"""The cache rank's service where one epoch ends and another begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_model import write_model

from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings, SelectionSettings
from tandemkv.cache_rank.service.service import SharedEngineService


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SharedEngineService]:
    found = SharedEngineService(
        run_dir=RunDir.create(tmp_path / "run"),
        model_dir=write_model(tmp_path / "model"),
        settings=RankSettings(selection=SelectionSettings(policy="look_ahead")),
        max_rows=3,
        homes=Homes.on_host(),
    )
    yield found
    found._session = None
    found._heartbeat.close()
    found._listener.close()
    found._control.close()


def test_silence_that_is_told_late_does_not_end_the_next_epoch(
    service: SharedEngineService,
) -> None:
    """The thread of heartbeats may be held up while the service opens another."""
    aborted: list[int] = []
    session: Any = SimpleNamespace(number=2, abort=lambda: aborted.append(2))
    service._session = session
    service._heartbeat._on_silence(1)
    assert not aborted
    service._heartbeat._on_silence(2)
    assert aborted == [2]
