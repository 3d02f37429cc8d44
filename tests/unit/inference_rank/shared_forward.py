# SPDX-License-Identifier: Apache-2.0
"""Real processes of engines, and a forward pass over link ``shared`` that is played here."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
from engine_process import start_engine

from tandemkv.cache_rank.policies.registry import selection_values
from tandemkv.cache_rank.protocol.engine import DenseLengths
from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.cache_rank.protocol.ipc import server_pid
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes
from tandemkv.cache_rank.protocol.memory.shared_region import RegionSizes, layers_of_pool, pools_of
from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.cache_rank.protocol.step_ring import RESIDENT, StepRow
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.links.base import DecodeRows, ExtendRow, StepLostError
from tandemkv.inference_rank.links.connection import KEPT
from tandemkv.inference_rank.links.kept_tensors import make_tensors
from tandemkv.inference_rank.links.sharded import make_connection
from tandemkv.inference_rank.links.shared import SharedLink
from tandemkv.inference_rank.links.signals import HostSignals

ROWS, LENGTHS, STEPS = [1, 2, 3], [90, 120, 75], 40
CONTEXT = 256


PATIENT, QUICK = 60, 10
"""Signs of life, of 0.2 s, that may be missed. A busy machine misses some: few matter only where an
engine is stopped that has to be noticed."""


def settings_of(
    policy: str, placement: dict[str, object], *, misses: int = PATIENT, **selection: object
) -> RankSettings:
    """Settings of a small selection, on link shared."""
    given = {
        "policy": policy,
        "budget_tokens": 16,
        "resident_factor": 1.0,
        "num_sink_tokens": 4,
        "num_recent_tokens": 8,
        "fetch_cap": 4,
        **selection,
    }
    return RankSettings.model_validate(
        {
            "selection": json.loads(json.dumps(selection_values(given), default=vars)),
            "placement": {"link": "shared", **placement},
            "cache": {"capacity_tokens": 1024},
            "exchange": {"heartbeat_interval_s": 0.2, "heartbeat_misses": misses},
        }
    )


class Engines:
    """Two processes, of which one serves and one waits."""

    def __init__(
        self, run_dir: RunDir, model_dir: Path, settings: RankSettings, rank: int = 0
    ) -> None:
        self._given = run_dir.path, model_dir, settings.model_dump_json(), rank
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
        self.start_another()

    def start_another(self) -> None:
        """Start one more; one that takes over while locks of a killed one go may end itself."""
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

    homes = Homes.on_host()

    def __init__(self, run_dir: RunDir, model_dir: Path, settings: RankSettings) -> None:
        self.model = read_model_spec(model_dir, dtype="float32", max_context=CONTEXT)
        selection = settings.selection
        self.sizes = RegionSizes(
            num_slots=settings.cache.capacity_tokens + 1, num_rows=4, page_size=1,
            is_apart=settings.placement.has_far_pool, num_sharing=settings.placement.head_shards,
            has_whole_pool=settings.placement.has_far_host,
        )  # fmt: skip
        self.kept = make_tensors(KEPT, self.model, settings, self.sizes, self.homes, run_dir)
        self.pools = pools_of(self.kept, self.model, selection, self.sizes)
        self.counters = Counters()
        ranks = range(settings.placement.head_shards)
        self.connection = make_connection(
            run_dirs=[run_dir.of_rank(rank) for rank in ranks], settings=settings,
            model=self.model, sizes=self.sizes, kept=self.kept, counters=self.counters,
        )  # fmt: skip
        self.num_resident = selection.num_resident
        self.num_cold = DenseLengths.of(selection, selection.num_resident).num_cold
        # What the first call imports would hold up the heartbeat of an epoch.
        torch.testing.assert_close(torch.zeros(1), torch.zeros(1))
        self.connect()
        self.link = self.make_link()
        self.window = selection.seed_window
        self.table = self.kept["req_to_token"]
        order = torch.randperm(self.sizes.num_slots - 1, generator=torch.Generator().manual_seed(3))
        self.slots = (order[: 3 * CONTEXT] + 1).view(3, CONTEXT).to(torch.int32)
        self.num_lost = 0
        self.begun: tuple[int, ...] = ()
        """Rows whose prompts are done, while others are still to come."""
        self.remote: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of the pass under way: what engines attended to, and what it has to be."""

    def connect(self) -> None:
        """Open the first epoch."""
        self.connection.connect(timeout_s=120)

    def make_link(self) -> SharedLink:
        """Return what `decode` and others hand over to."""
        return SharedLink(
            self.connection,
            HostSignals(self.connection.parts, self.model.num_layers),
            generation_of=lambda row: 10 + row,
            rows_on_host=lambda: None,
        )

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
            for into, of_layer in zip(layers_of_pool(self.kept, self.sizes), kv, strict=True):
                into[:, slot] = of_layer
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

    def slow_of(self, number: int) -> torch.Tensor | None:
        """Return whose step `number` is slow; of every fourth nobody's is."""
        if not self.link.program.slow_steps:
            return None
        return torch.tensor([(number + row) % 4 == 0 for row in ROWS])

    def decode(self, number: int) -> list[torch.Tensor]:
        """Make a step; returns what each layer attends to.

        Of requests whose step is slow that is no set, and the engine may be changing theirs.
        """
        program, slow = self.link.program, self.slow_of(number)
        selects = program.selects and (slow is None or bool(slow.any()))
        kind = DecodeKind.SELECTING if selects else DecodeKind.DENSE
        if not selects and program.index_interval:
            kind = DecodeKind.INDEXING
        lengths = torch.tensor([n + number for n in LENGTHS])
        for row, length in zip(ROWS, lengths.tolist(), strict=True):
            self.store(row, length - 1, length)
        self.link.begin_decode(
            kind,
            DecodeRows(
                rows=torch.tensor(ROWS), lengths=lengths, lengths_on_host=lengths,
                req_to_token=self.table, num_cold=self.num_cold, slow=slow,
            ),
        )  # fmt: skip
        found = []
        by_set = [row for i, row in enumerate(ROWS) if slow is None or not slow[i]]
        shape = (len(ROWS), self.model.num_qo_heads, self.model.head_dim)
        for layer in range(self.model.num_layers):
            query = self.random(number * 131 + layer, *shape)
            nothing = torch.empty(0)
            # Its tokens are stored already.
            self.link.select_with_query(layer, query, nothing, nothing, None, None, False)
            is_sparse = program.is_sparse_layer(layer)
            remote = self.link.remote_output(layer)
            assert (remote is not None) is program.attends_remotely(kind, layer)
            if remote is not None:
                whole = self.attended(layer, query, lengths.tolist())
                if is_sparse and slow is not None:
                    whole[~slow] = 0.0
                else:
                    found.append(remote.clone())
                self.remote.append((remote.clone(), whole))
            rest = self.link.attend_selected(layer, query)
            if rest is not None:
                found.append(rest.clone())
            self.link.await_set(layer)
            if is_sparse:
                found.append(self.pools.resident[layer][0][by_set, : self.num_resident].clone())
            self.link.attended(layer, query, len(ROWS))
        self.link.end_step()
        return found

    def attended(self, layer: int, query: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Return what attention to all tokens of the requests gives."""
        found = []
        for row, length, q in zip(ROWS, lengths, query, strict=True):
            of_layer = layers_of_pool(self.kept, self.sizes)[layer]
            k, v = of_layer[:, self.table[row, :length].long()].transpose(1, 2)
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
            self.begun += (row,)
        self.begun = ()

    def until_done(self, part: object, num_steps: int | None = None) -> list[torch.Tensor]:
        """Do a step until the engine has finished it."""
        while True:
            self.remote.clear()
            try:
                found = part()  # type: ignore[operator]
                step = self.link.pass_step
                if step is not None and self.link.is_done(step):
                    for output, whole in self.remote:  # of a pass that was lost it is anything
                        torch.testing.assert_close(output, whole)
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
            connection.leave("another one is lost")  # of those that live
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
                            flags=RESIDENT if num_steps is not None or row in self.begun else 0)
                )  # fmt: skip
            connection.resume(tuple(rows))
            if all(part.await_finish(part.step) for part in connection.parts):
                connection.confirm(connection.step)
                if num_steps is not None:
                    assert connection.resumed_rows == (len(ROWS), 0)
                return
