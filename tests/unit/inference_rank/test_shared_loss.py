# SPDX-License-Identifier: Apache-2.0
"""Two real processes: the engine's is killed in the middle of steps, and the next goes on.

The forward pass is played here. What each layer would attend to is compared, step by step, with a
run in which nothing is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_process import start_engine
from tiny_model import write_model

from tandemkv.cache_rank.policies.registry import selection_values
from tandemkv.cache_rank.protocol.descriptor_holder import DescriptorHolder
from tandemkv.cache_rank.protocol.engine import DenseLengths
from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.cache_rank.protocol.ipc import server_pid
from tandemkv.cache_rank.protocol.mapped_tensors import Homes
from tandemkv.cache_rank.protocol.model_spec import read_model_spec
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings import RankSettings
from tandemkv.cache_rank.protocol.shared_region import RegionSizes, pools_of
from tandemkv.cache_rank.protocol.step_ring import RESIDENT, StepRow
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.links.base import DecodeRows, ExtendRow, StepLostError
from tandemkv.inference_rank.links.connection import SharedConnection, make_kept_tensors
from tandemkv.inference_rank.links.shared import SharedLink
from tandemkv.inference_rank.links.signals import HostSignals

pytestmark = pytest.mark.timeout(240)

ROWS, LENGTHS, STEPS = [1, 2, 3], [90, 120, 75], 40
CONTEXT = 256


class Engines:
    """Two processes, of which one serves and one waits."""

    def __init__(self, run_dir: RunDir, model_dir: Path, settings: RankSettings) -> None:
        self._given = run_dir.path, model_dir, settings.model_dump_json()
        self._run_dir = run_dir
        self._running = [start_engine(*self._given), start_engine(*self._given)]

    def kill(self, number: signal.Signals) -> None:
        """Signal the one that serves, once one does, and start another."""
        deadline = time.monotonic() + 60
        while not (found := [p.pid for p in self._running if p.pid == self.serving()]):
            assert time.monotonic() < deadline, "none serves"
            time.sleep(0.01)
        assert found[0]
        os.kill(found[0], number)
        self._running.append(start_engine(*self._given))

    def pause(self, seconds: float) -> threading.Timer:
        """Stop the one that serves for so long; returns who lets it go on."""
        pid = self.serving()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))
        timer.start()
        return timer

    def serving(self) -> int | None:
        return server_pid(self._run_dir.heartbeat_socket)

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.join()


class Forward:
    """Plays the forward pass of three requests, and goes back a step when the engine is lost."""

    def __init__(self, run_dir: RunDir, model_dir: Path, settings: RankSettings) -> None:
        self.model = read_model_spec(model_dir, dtype="float32", max_context=CONTEXT)
        selection = settings.selection
        self.sizes = RegionSizes(
            num_slots=settings.cache.capacity_tokens + 1, num_rows=4, page_size=1,
            is_apart=settings.placement.has_far_pool,
        )  # fmt: skip
        self.kept = make_kept_tensors(self.model, settings, self.sizes, Homes.on_host(), run_dir)
        self.pools = pools_of(self.kept, self.model, selection, self.sizes)
        self.connection = SharedConnection(
            run_dir=run_dir, settings=settings, model=self.model, sizes=self.sizes,
            kept=self.kept, counters=Counters(),
        )  # fmt: skip
        self.num_resident = selection.num_resident
        self.num_cold = DenseLengths.of(selection, selection.num_resident).num_cold
        self.connection.connect(timeout_s=120)
        self.link = SharedLink(
            self.connection,
            HostSignals(self.connection, self.model.num_layers),
            generation_of=lambda row: 10 + row,
            rows_on_host=lambda: None,
        )
        self.window = selection.seed_window
        self.table = self.kept["req_to_token"]
        order = torch.randperm(self.sizes.num_slots - 1, generator=torch.Generator().manual_seed(3))
        self.slots = (order[: 3 * CONTEXT] + 1).view(3, CONTEXT).to(torch.int32)
        self.num_lost = 0

    def random(self, seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    def store(self, row: int, first: int, last: int) -> torch.Tensor:
        """Write K/V of positions ``[first, last)``; the same each time."""
        slots = self.slots[row - 1, first:last]
        self.table[row, first:last] = slots
        shape = (self.model.num_kv_heads, self.model.head_dim)
        for position in range(first, last):
            slot = int(self.slots[row - 1, position])
            kv = self.random(row * 1000 + position, self.model.num_layers, 2, *shape)
            self.kept["kv"][:, :, slot] = kv
        return slots.long()

    def prefill(self, row: int, length: int) -> None:
        slots = self.store(row, 0, length)
        window = (max(0, length - self.window), length)
        self.link.begin_extend(
            [ExtendRow(row=row, prefix_len=0, length=length, table=self.table[row, :length],
                       window=window)]
        )  # fmt: skip
        shape = (window[1] - window[0], self.model.num_qo_heads, self.model.head_dim)
        for layer in range(self.model.num_layers):
            is_sparse = self.link.program.is_sparse_layer(layer)
            queries = [self.random(row * 77 + layer, *shape)] if is_sparse else []
            self.link.extend(layer, slots, queries)
        self.link.end_extend()

    def decode(self, number: int) -> list[torch.Tensor]:
        """Make a step; returns what each layer attends to."""
        lengths = torch.tensor([n + number for n in LENGTHS])
        for row, length in zip(ROWS, lengths.tolist(), strict=True):
            self.store(row, length - 1, length)
        self.link.begin_decode(
            DecodeKind.SELECTING,
            DecodeRows(
                rows=torch.tensor(ROWS), lengths=lengths, lengths_on_host=lengths,
                req_to_token=self.table, num_cold=self.num_cold,
            ),
        )  # fmt: skip
        found = []
        shape = (len(ROWS), self.model.num_qo_heads, self.model.head_dim)
        for layer in range(self.model.num_layers):
            query = self.random(number * 131 + layer, *shape)
            nothing = torch.empty(0)
            # Its tokens are stored already.
            self.link.select_with_query(layer, query, nothing, nothing, None, None, False)
            remote = self.link.remote_output(layer)
            assert (remote is not None) is self.link.program.attends_remotely(layer)
            if remote is not None:
                found.append(remote.clone())
                torch.testing.assert_close(remote, self.attended(layer, query, lengths.tolist()))
            self.link.await_set(layer)
            if self.link.program.is_sparse_layer(layer):
                found.append(self.pools.resident[layer][0][ROWS, : self.num_resident].clone())
            self.link.attended(layer, query, len(ROWS))
        self.link.end_step()
        return found

    def attended(self, layer: int, query: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Return what attention to all tokens of the requests gives."""
        found = []
        for row, length, q in zip(ROWS, lengths, query, strict=True):
            k, v = self.kept["kv"][layer, :, self.table[row, :length].long()].transpose(1, 2)
            group = len(q) // len(k)
            k, v = (x.repeat_interleave(group, 0) for x in (k, v))
            weights = torch.softmax(self.model.scale * (k @ q[:, :, None])[..., 0], -1)
            found.append((weights[:, None] @ v)[:, 0].flatten())
        return torch.stack(found)

    def run(self) -> list[list[torch.Tensor]]:
        steps: list[list[torch.Tensor]] = []
        self.begin()
        while len(steps) < STEPS:
            steps.append(self.until_done(lambda: self.decode(len(steps) + 1), len(steps)))
        return steps

    def begin(self) -> None:
        for row, length in zip(ROWS, LENGTHS, strict=True):
            self.until_done(lambda r=row, n=length: self.prefill(r, n))  # type: ignore[misc]

    def until_done(self, part: object, num_steps: int | None = None) -> list[torch.Tensor]:
        """Do a step until the engine has finished it."""
        while True:
            try:
                found = part()  # type: ignore[operator]
                step = self.link.pass_step
                if step is not None and self.link.is_done(step):
                    self.connection.confirm(step)
                    return found  # type: ignore[no-any-return]
                self.connection.mark_lost("a step was not finished")
            except StepLostError:
                pass
            self.num_lost += 1
            self.resume(num_steps)

    def resume(self, num_steps: int | None) -> None:
        connection = self.connection
        while True:
            self.link.rewind()
            try:
                connection.adopt(connection.open_connection(timeout_s=60))
            except CacheRankLostError:
                continue
            rows = []
            for row, length in zip(ROWS, LENGTHS, strict=True):
                length += num_steps or 0
                rows.append(
                    StepRow(row=row, generation=10 + row, length=length, prefix_len=length,
                            flags=RESIDENT if num_steps is not None else 0)
                )  # fmt: skip
            connection.resume(tuple(rows))
            if connection.await_finish(connection.step):
                connection.confirm(connection.step)
                if num_steps is not None:
                    assert connection.resumed_rows == (len(ROWS), 0)
                return


@pytest.fixture(params=[("oracle", False), ("last_query", True)], ids=["oracle", "apart"])
def settings(request: pytest.FixtureRequest) -> RankSettings:
    policy, is_apart = request.param
    selection = {
        "policy": policy,
        "budget_tokens": 16,
        "resident_factor": 1.0,
        "num_sink_tokens": 4,
        "num_recent_tokens": 8,
        "fetch_cap": 4,
        "index_dtype": "int8",
        "sample_tokens": 8,
    }
    return RankSettings.model_validate(
        {
            "selection": json.loads(json.dumps(selection_values(selection), default=vars)),
            "placement": {"link": "shared", "two_gpus": is_apart},
            "cache": {"capacity_tokens": 1024},
            "exchange": {"heartbeat_interval_s": 0.2},
        }
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
    if not played.sizes.is_apart:  # where remote output is compared
        played.decode(1)
        assert played.link.is_void
        assert played.link.pass_step is None
    played.link.breaks_off = True
    played.resume(None)
    assert played.connection.epoch > opened
