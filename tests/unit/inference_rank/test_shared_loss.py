# SPDX-License-Identifier: Apache-2.0
"""Two real processes: the engine's is killed in the middle of steps, and the next goes on.

The forward pass is played here. What each layer would attend to is compared, step by step, with a
run in which nothing is killed.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_forward import LENGTHS, QUICK, ROWS, STEPS, Engines, Forward, settings_of
from stream_forward import engine_of
from tiny_model import write_model

from tandemkv.cache_rank.protocol import fault_points
from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.errors import HandshakeRefusedError
from tandemkv.cache_rank.protocol.memory.descriptor_holder import DescriptorHolder
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.cache_rank.service import service
from tandemkv.cache_rank.service.session import SharedSession
from tandemkv.inference_rank.links.base import DecodeRows, ExtendRow

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=[("oracle", False), ("last_query", True)], ids=["oracle", "apart"])
def settings(request: pytest.FixtureRequest) -> RankSettings:
    policy, is_apart = request.param
    return settings_of(
        policy, {"two_gpus": is_apart}, misses=QUICK, index_dtype="int8", sample_tokens=8
    )


@pytest.fixture
def forward(tmp_path: Path, settings: RankSettings) -> Iterator[tuple[Forward, Engines]]:
    run_dir = RunDir.create(tmp_path / "run")
    model_dir = write_model(tmp_path / "model")
    holder = DescriptorHolder(run_dir.holder_socket, run_dir.token)
    engines = Engines(run_dir, model_dir, settings)
    try:
        played = Forward(run_dir, model_dir, settings)
        yield played, engines
        played.connection.close()
        played.kept.close()
    finally:
        engines.close()
        holder.close()


def test_memory_that_no_engine_keeps_is_refused(
    forward: tuple[Forward, Engines], caplog: pytest.LogCaptureFixture
) -> None:
    """It is no book of an earlier engine, which would be carried on for good."""
    played, _ = forward
    connection = played.connection.parts[0]
    for name in ("strange", ""):
        if name:
            connection._theirs.allocate(name, (3,), torch.int64)
        connection.leave("a test")
        caplog.clear()
        opened = connection.open_connection(timeout_s=60)
        names = {spec.name for spec in opened.theirs.specs}
        assert "resident_positions" in names
        assert "strange" not in names
        is_refused = any(
            "'strange' is nothing that this engine keeps" in text for text in caplog.messages
        )
        assert is_refused is bool(name)
        connection.adopt(opened)


def test_an_engine_that_cannot_be_built_just_now_costs_no_resident_set(
    tmp_path: Path, settings: RankSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may be short for a moment, or descriptors; the next try takes up all rows."""

    build, errors = service.SharedSession, [MemoryError("no room for the key index")]

    def build_later(**given: Any) -> SharedSession:
        if errors:
            raise errors.pop()
        return build(**given)

    run_dir, model_dir = RunDir.create(tmp_path / "run"), write_model(tmp_path / "model")
    with engine_of(run_dir, model_dir, settings, homes=Homes.on_host()):
        played = Forward(run_dir, model_dir, settings)
        played.run()
        played.connection.leave("a test")
        monkeypatch.setattr(service, "SharedSession", build_later)
        with pytest.raises(HandshakeRefusedError, match="field=memory: MemoryError"):
            played.connection.open_connection(timeout_s=30)
        played.resume(STEPS)
        assert played.connection.resumed_rows == (len(ROWS), 0)
        played.connection.close()
        played.kept.close()


def test_books_of_another_shape_are_given_up(
    forward: tuple[Forward, Engines], caplog: pytest.LogCaptureFixture
) -> None:
    """As where what a policy keeps has changed on disk."""
    played, _ = forward
    connection = played.connection.parts[0]
    books = connection.books
    wanted = {spec.name: spec for spec in books.specs}["resident_last_used"]
    books.forget(wanted.name)
    books.allocate(wanted.name, (*wanted.shape, 2), wanted.dtype)
    connection.leave("a test")
    opened = connection.open_connection(timeout_s=60)
    assert wanted in opened.theirs.specs
    assert any("field=books: UnusableBooksError" in text for text in caplog.messages)
    connection.adopt(opened)


def test_what_is_attended_to_is_that_of_an_undisturbed_run(
    forward: tuple[Forward, Engines],
) -> None:
    played, engines = forward
    want = played.run()
    rng, signals = random.Random(2), (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL)

    def kill(number: signal.Signals) -> None:
        time.sleep(0.1 + rng.random())
        engines.kill(number)

    for number in signals:
        killer = threading.Thread(target=kill, args=(number,))
        killer.start()
        losses = played.num_lost
        while killer.is_alive() or played.num_lost == losses:
            found = played.run()
            for mine, theirs in zip(found, want, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        killer.join()
    assert played.num_lost == len(signals)


@pytest.mark.parametrize("settings", [("last_query", False)], indirect=True, ids=["last_query"])
def test_the_set_of_a_request_that_was_dense_is_filled_before_its_step(
    forward: tuple[Forward, Engines],
) -> None:
    """No layer of such a step waits for the engine, which selects for the next one."""
    played, engines = forward
    row, length = 1, played.num_cold
    slots = played.store(row, 0, length)
    played.link.begin_extend(
        [ExtendRow(row=row, prefix_len=0, length=length, table=played.table[row, :length])]
    )
    for layer in range(played.model.num_layers):
        played.link.extend(layer, slots, [])
    played.link.end_extend()
    played.store(row, length, length + 1)
    timer = engines.pause(0.4)
    rows, lengths = torch.tensor([row]), torch.tensor([length + 1])
    played.link.seed_identity(rows, None)
    played.link.begin_decode(
        DecodeKind.SELECTING,
        DecodeRows(
            rows=rows, lengths=lengths, lengths_on_host=lengths, req_to_token=played.table,
            num_cold=played.num_cold,
        ),
    )  # fmt: skip
    first = slots[: played.num_resident]
    for layer in range(played.model.num_layers):
        if played.link.program.is_sparse_layer(layer):
            for kind, resident in enumerate(played.pools.resident[layer]):
                assert torch.equal(resident[row], played.kept["kv"][layer, kind, first]), layer
    played.link.recover()
    timer.join()


@pytest.mark.parametrize("settings", [("oracle", False)], indirect=True, ids=["oracle"])
def test_an_engine_that_was_not_told_of_requests_is_replaced(
    forward: tuple[Forward, Engines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The announcement is lost, and it waits for one as idly as its heartbeats are answered."""
    played, engines = forward
    want, connection = played.run(), played.connection
    for _ in range(2):
        engines.start_another()
    monkeypatch.setattr(fault_points, "_plan", None)
    fault_points.enable_faults(
        "inference_rank", tmp_path, {fault_points.FAULTS_VARIABLE: "ring.write=drop@1x1"}
    )
    connection.resume(())
    deadline = time.monotonic() + 30
    while connection.lost_reason is None:
        assert time.monotonic() < deadline
        connection.lose_if_stuck()
        time.sleep(0.01)
    assert "does not take up the requests" in connection.lost_reason
    played.resume(None)
    for mine, theirs in zip(played.run(), want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_an_engine_whose_epoch_ends_in_order_lives_and_goes_back_a_step(
    forward: tuple[Forward, Engines],
) -> None:
    """As where the engine of another tensor-parallel rank is lost, and this one has finished."""
    played, engines = forward
    want, serving = played.run(), engines.serving()
    played.begin()
    for number, theirs in zip(range(1, 7), want, strict=False):
        played.decode(number)
        step = played.link.pass_step
        assert step is not None
        assert played.link.is_done(step)
        epoch = played.connection.epoch
        played.connection.leave("another one is lost")
        played.resume(number - 1)
        assert played.connection.epoch == epoch + 1
        found = played.until_done(lambda n=number: played.decode(n), number - 1)  # type: ignore[misc]
        assert all(torch.equal(a, b) for a, b in zip(found, theirs, strict=True))
    assert engines.serving() == serving
    assert played.num_lost == 0


def test_a_pass_that_is_not_broken_off_runs_to_its_end_and_is_void(
    forward: tuple[Forward, Engines],
) -> None:
    """As where tensor-parallel ranks wait for its sums."""
    played, engines = forward
    played.begin()
    opened = played.connection.epoch
    engines.kill(signal.SIGKILL)
    played.link.breaks_off = False
    deadline = time.monotonic() + 20
    while not played.link.is_void:
        assert time.monotonic() < deadline
        played.prefill(ROWS[0], LENGTHS[0])
    assert played.connection.lost_reason is not None
    played.decode(1)
    assert played.link.is_void
    assert played.link.pass_step is None
    played.link.breaks_off = True
    played.resume(None)
    assert played.connection.epoch > opened
