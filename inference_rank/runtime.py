# SPDX-License-Identifier: Apache-2.0
"""What the plugin holds in SGLang's scheduler process, and where its hooks find it.

There is one runtime per process, created with the attention backend. Hooks that run before
that, or in processes without a model (HTTP server), see None and do nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.messages import RowFlag, RowStep, Welcome
from tandemkv.cache_rank.protocol.model_spec import ModelSpec, read_model_spec
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings import (
    RUN_DIR_VARIABLE,
    SETTINGS_VARIABLE,
    RankSettings,
)

from .cache_client import HANDSHAKE_TIMEOUT_S, CacheClient, Connection
from .counters import Counters
from .packs import PackQueue
from .refresh import RefreshSchedule, Vocabulary, schedule_for
from .resident_set import ResidentSet

_GENERATION_BITS = 40


@dataclass(slots=True)
class Runtime:
    """State of one inference rank. All of it belongs to the scheduler thread."""

    settings: RankSettings
    model: ModelSpec
    client: CacheClient
    resident: ResidentSet
    counters: Counters
    req_to_token_pool: Any
    packs: PackQueue | None = None
    num_flushes: int = 0
    step_id: int = 0
    decode_step: int = 0
    middle_chunk_row: int | None = None
    running_reqs: list[Any] = field(default_factory=list)
    running_lengths: list[int] = field(default_factory=list)
    scheduler: Any = None
    refresh: RefreshSchedule = field(default_factory=RefreshSchedule)
    load_tokenizer: Callable[[], Vocabulary] | None = None
    _lengths: dict[int, int] = field(default_factory=dict)
    _dirty: set[int] = field(default_factory=set)

    def connect(self, *, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> None:
        """Open an epoch; forgets everything that belonged to an earlier one."""
        self.client.drop()
        self.adopt(self.client.open_connection(timeout_s=timeout_s))

    def adopt(self, connection: Connection) -> None:
        """Begin the epoch of `connection`; forgets everything that belonged to an earlier one."""
        try:
            self._check_capacity(connection.welcome)
        except BaseException:
            connection.close()
            raise
        welcome = self.client.adopt(connection)
        self._lengths.clear()
        self._dirty.clear()
        self.refresh = self.schedule_for()
        self.packs = PackQueue(
            resident=self.resident,
            exchange=self.settings.exchange,
            counters=self.counters,
            generation_of=self.generation,
            epoch=welcome.epoch,
        )

    def _check_capacity(self, welcome: Welcome) -> None:
        capacity = self.settings.cache.capacity_tokens
        if welcome.num_slots <= capacity:
            raise SettingsError(
                f"the cache rank has {welcome.num_slots} slots, capacity_tokens={capacity} needs "
                "one more; start both ranks with the same settings"
            )

    def schedule_for(self) -> RefreshSchedule:
        """Return the schedule that the policy declares.

        Raises
        ------
        SettingsError
            If no token of the vocabulary ends a sentence, or there is no tokenizer.
        """
        known = self.refresh.triggers  # those of an earlier epoch
        return schedule_for(self.settings.selection, self.load_tokenizer, triggers=known)

    def generation(self, row: int) -> int:
        """Identity of the present occupancy of `row`; SGLang's own counter restarts at a flush."""
        count = int(self.req_to_token_pool.req_generation[row])
        return (self.num_flushes << _GENERATION_BITS) | count

    def flags_for(self, length: int) -> int:
        """Row flags of a request that has `length` tokens."""
        if self.resident.is_dense(length):
            return 0
        return int(RowFlag.EXACT if self.client.all_exact else RowFlag.SPARSE)

    def note_lengths(self, rows: list[int], lengths: list[int]) -> None:
        """Remember how many slots of each row the cache rank knows."""
        self._lengths.update(zip(rows, lengths, strict=True))
        self._dirty.difference_update(rows if not self._dirty.isdisjoint(rows) else ())

    def mark_dirty(self, row: int) -> None:
        """Resend the slots of `row` before the next step: they may have been rewritten."""
        if row in self._lengths:
            self._dirty.add(row)
            self.counters.remapped_rows_total += 1

    def take_dirty(self, *, but: list[int]) -> tuple[list[RowStep], list[torch.Tensor]]:
        """Return the dirty rows and their slot tables, and forget them.

        Parameters
        ----------
        but : list of int
            Rows whose whole table goes with the step anyway.
        """
        steps, tables = [], []
        for row in sorted(self._dirty - set(but)):
            length = self._lengths[row]
            steps.append(
                RowStep(
                    row=row,
                    generation=self.generation(row),
                    length=length,
                    prefix_len=length,
                    flags=0,
                    window=0,
                )
            )
            tables.append(self.req_to_token_pool.req_to_token[row, :length].to(torch.int32))
        self._dirty.clear()
        return steps, tables

    def release(self, row: int) -> None:
        """Note that the request in `row` ended or was retracted."""
        self.client.release(row, self.generation(row))
        self._lengths.pop(row, None)
        self._dirty.discard(row)
        self.counters.released_rows_total += 1


class RemoteRuntime(Protocol):
    """What recovery needs of a runtime whose cache rank is in another process."""

    client: Any
    counters: Counters
    running_reqs: list[Any]
    scheduler: Any

    def adopt(self, connection: Any) -> None:
        """Begin the epoch of a connection that ``client.open_connection`` returned."""


_current: Runtime | None = None
_local: Any = None


def current() -> Runtime | None:
    """Return the runtime of this process, if it has one with a cache rank elsewhere."""
    return _current


def current_local() -> Any:
    """Return the `in_process.start.LocalRuntime` of this process, if it has one."""
    return _local


def with_other_process() -> RemoteRuntime | None:
    """Return the runtime of this process, if its cache rank is in another process."""
    if _current is not None:
        return _current
    return _local if _local is not None and _local.client is not None else None


def set_current_local(runtime: Any) -> None:
    """Enter this process's runtime with a cache rank of its own."""
    global _local
    _local = runtime


def settings_from_environment() -> RankSettings:
    """Return the settings that the launcher handed over.

    Raises
    ------
    SettingsError
        If the variable is missing or does not validate; the field is named.
    """
    text = os.environ.get(SETTINGS_VARIABLE)
    if not text:
        raise SettingsError(
            f"{SETTINGS_VARIABLE} is not set; start the server with `tandemkv serve` or `tandemkv "
            "inference-rank`, which set it"
        )
    try:
        return RankSettings.model_validate_json(text)
    except ValueError as error:
        raise SettingsError(f"{SETTINGS_VARIABLE}: {error}") from error


def run_dir_from_environment() -> RunDir:
    """Return the private directory that both ranks share.

    Raises
    ------
    SettingsError
        If the variable is missing.
    """
    path = os.environ.get(RUN_DIR_VARIABLE)
    if not path:
        raise SettingsError(f"{RUN_DIR_VARIABLE} is not set; start with `tandemkv serve`")
    return RunDir.open(Path(path))


def create(runner: Any) -> Runtime:
    """Create this process's runtime for SGLang's model runner and open the first epoch.

    Raises
    ------
    SettingsError, UnsupportedModelError, CacheRankError
        The server must not start.
    """
    global _current
    settings = settings_from_environment()
    capacity = settings.cache.capacity_tokens
    if runner.max_total_num_tokens != capacity:
        raise SettingsError(
            f"SGLang sized its slots to {runner.max_total_num_tokens}, "
            f"capacity_tokens={capacity}: pass --max-total-tokens {capacity}"
        )
    config = runner.model_config
    model = read_model_spec(
        Path(config.model_path),
        dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
        max_context=int(config.context_len),
    )
    counters = Counters()
    device = torch.device(runner.device)
    pool = runner.req_to_token_pool
    _current = Runtime(
        settings=settings,
        model=model,
        client=CacheClient(
            run_dir=run_dir_from_environment(),
            settings=settings,
            model=model,
            max_rows=int(pool.size),
            page_size=int(runner.page_size),
            counters=counters,
            device=device,
        ),
        resident=ResidentSet(model, settings.selection, int(pool.size), device),
        counters=counters,
        req_to_token_pool=pool,
        load_tokenizer=lambda: tokenizer_of(
            runner.server_args.tokenizer_path or str(config.model_path)
        ),
    )
    _current.connect()
    return _current


def tokenizer_of(model_path: str) -> Vocabulary:
    """Load the tokenizer of a model."""
    from transformers import AutoTokenizer

    tokenizer: Vocabulary = AutoTokenizer.from_pretrained(model_path)
    return tokenizer
