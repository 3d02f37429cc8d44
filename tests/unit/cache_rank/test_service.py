# SPDX-License-Identifier: Apache-2.0
"""The cache rank's service where one epoch ends and another begins."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import write_model

from tandemkv.cache_rank.protocol.control import ControlClient
from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.handshake import open_epoch
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes, MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_region import RegionSizes
from tandemkv.cache_rank.protocol.messages import PROTOCOL_VERSION, Hello
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


@pytest.mark.parametrize("is_built", [True, False], ids=["built", "cannot be built"])
def test_all_is_given_back_where_the_inference_rank_ends_meanwhile(
    service: SharedEngineService, monkeypatch: pytest.MonkeyPatch, is_built: bool
) -> None:
    """An engine takes long to build; on a GPU what stays mapped keeps the memory of the dead."""
    connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.close()
    tensors, made, closed = MappedTensors(), MappedTensors(), []
    tensors.allocate("flags", (4,), torch.int64)
    made.allocate("stamps", (4,), torch.int64)

    def build(*, made: MappedTensors, **_: Any) -> Any:
        made.allocate("books", (4,), torch.int64)
        if not is_built:
            raise ProtocolError("that is nothing that this engine keeps")
        return SimpleNamespace(close=lambda: closed.append(True))

    monkeypatch.setattr("tandemkv.cache_rank.service.service.SharedSession", build)
    monkeypatch.setattr("tandemkv.cache_rank.service.service.part_books", lambda *_: made)
    monkeypatch.setattr(service._listener, "accept", lambda *_, **__: (connection, tensors))
    with pytest.raises(BrokenPipeError if is_built else ProtocolError):
        service._accept(1, service._model, RegionSizes(num_slots=9, num_rows=2, page_size=1), bool)
    assert closed == [True] * is_built
    assert connection.fileno() == -1
    assert not tensors.specs
    assert not made.specs


def test_who_was_welcomed_and_is_gone_is_waited_for_no_longer(
    service: SharedEngineService,
) -> None:
    """It was killed, or had no memory for the epoch. The next one waits for less than a minute."""
    hello = Hello(
        protocol_version=PROTOCOL_VERSION, token=service._run_dir.token, model=service._model,
        settings=service._settings.flat(), max_rows=2, page_size=1,
    )  # fmt: skip
    stop = threading.Event()
    thread = threading.Thread(target=service.run, args=(stop,))
    thread.start()
    try:
        for epoch in (1, 2):
            with closing(ControlClient(service._run_dir)) as client:
                assert open_epoch(client, hello, 10).epoch == epoch
    finally:
        stop.set()
        thread.join()


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
