# SPDX-License-Identifier: Apache-2.0
"""The ordered ring of announcements, from the inference rank's host to the cache rank's.

Everything that a step is about goes through this one ring: prefill, decode, release of rows. Two
channels would let a decode overtake the seeding of its row. An entry is a record of integers; what
is larger lies in mapped tensors that the entry's step number orders.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from operator import gt
from typing import NamedTuple, Self, overload

import torch

from .errors import CacheRankLostError, ProtocolError
from .fault_points import reach
from .step_flags import StepFlags

NUM_ENTRIES = 64
ANNOUNCED, CONSUMED = range(2)
"""Flags of the latest entry written, and read."""
_HEADER = 6
"""Numbers before those of requests."""


RESIDENT = 4
"""The request has a resident set that is to be taken up."""
SLOW = 2
"""The request attends to everything in this decode step, and is selected for."""


class EntryKind(IntEnum):
    """What an entry announces."""

    EXTEND = 1
    """A prefill step."""
    DECODE = 2
    """A decode step that indexes or selects."""
    PREPARE = 3
    """No step: the engine is to load its kernels for prompts or, with requests, to capture a decode
    step of so many. It confirms to the other host when that is done."""
    RESUME = 4
    """Take up the rows of an earlier epoch: what survives is in mapped memory."""
    GROW = 5
    """Requests have outgrown dense attention: their first tokens become resident."""


class StepRow(NamedTuple):
    """One request of an entry.

    A tuple: with a dataclass reading an announcement of 32 requests takes 75 us instead of 21.
    """

    row: int
    """Of the request table; 0 is padding."""
    generation: int
    """Counts the tenants of the row."""
    length: int = 0
    prefix_len: int = 0
    """Tokens after the step, and before it. To be taken up: tokens that there are, twice."""
    window: int = 0
    """Prompt queries that seed the row's resident set; 0: it is not seeded in this step."""
    flags: int = 0
    """`SLOW` of a decode step, `RESIDENT` of a row to be taken up, or 0."""


ROW_WORDS = len(StepRow._fields)


class UnreadRows(Sequence[StepRow]):
    """The requests that an announcement describes, read when they are asked for.

    A captured decode step asks for their number alone, and the forward pass waits meanwhile: to
    read 8 requests takes 15 us. `content` has int64 words. `ProtocolError` is raised when a request
    is asked for and any of them is out of bounds.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._rows: tuple[StepRow, ...] | None = None

    def __len__(self) -> int:
        return len(self._content) // (ROW_WORDS * 8)

    @overload
    def __getitem__(self, index: int) -> StepRow: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[StepRow, ...]: ...

    def __getitem__(self, index: int | slice) -> StepRow | tuple[StepRow, ...]:
        if self._rows is None:
            words = memoryview(self._content).cast("q").tolist()
            columns = [words[i::ROW_WORDS] for i in range(ROW_WORDS)]
            if not _are_sound(columns):
                raise ProtocolError("a request of an announcement is out of bounds")
            self._rows = tuple(map(StepRow._make, zip(*columns, strict=True)))
        return self._rows[index]


@dataclass(slots=True, kw_only=True)
class StepEntry:
    """An announcement. Never changed, and not frozen: one more microsecond before each step."""

    kind: EntryKind
    step: int
    """Number that its flags are raised to; grows by one with each entry."""
    variant: int = 0
    """Of a decode: what it does beside the forward pass."""
    num_cold: int = 0
    """Of a decode: longest request that is not selected for."""
    rows: Sequence[StepRow] = ()
    """The requests, in the order of the batch; `UnreadRows` where it came through the ring."""
    announced_ns: int = field(default=0, compare=False)
    """When it was written, by the host's monotonic clock; 0 before that."""
    seen_ns: int = field(default=0, compare=False)
    """When the reader found it there; 0 where it was not read."""

    def words(self) -> list[int]:
        """Return the announcement as numbers, written now."""
        now = time.monotonic_ns()
        header = int(self.kind), self.step, self.variant, self.num_cold, len(self.rows), now
        return [*header, *chain.from_iterable(self.rows)]

    @classmethod
    def of(cls, words: memoryview, *, seen_ns: int = 0) -> Self:
        """Return the announcement that int64 `words` begin with, which may change afterwards.

        Raises `ProtocolError` if there is none.
        """
        if len(words) < _HEADER:
            raise ProtocolError(f"an announcement of {len(words)} numbers")
        number, step, variant, num_cold, count, announced_ns = words[:_HEADER].tolist()
        end = _HEADER + count * ROW_WORDS
        kind = _KINDS.get(number)
        if kind is None or not _HEADER <= end <= len(words) or min(step, variant, num_cold) < 0:
            raise ProtocolError(f"announcement of step {step}: kind={number}, {count} requests")
        return cls(
            kind=kind,
            step=step,
            variant=variant,
            num_cold=num_cold,
            rows=UnreadRows(words[_HEADER:end].tobytes()),
            announced_ns=announced_ns,
            seen_ns=seen_ns,
        )


_KINDS = {int(kind): kind for kind in EntryKind}
_FLAGS = frozenset((0, SLOW, RESIDENT, SLOW | RESIDENT))


def _are_sound(columns: Sequence[Sequence[int]]) -> bool:
    """Whether rows, each field of all of them, name no place before the beginning of a table."""
    _, _, lengths, prefix_lens, _, flags = columns
    return (
        min(min(column, default=0) for column in columns) >= 0
        and not any(map(gt, prefix_lens, lengths))
        and _FLAGS.issuperset(flags)
    )


def ring_shape(max_rows: int) -> tuple[int, int]:
    """Shape of the int64 tensor of a ring whose entries have up to `max_rows` requests."""
    return NUM_ENTRIES, _HEADER + max_rows * ROW_WORDS


class StepRing:
    """One end of the ring; one process only writes, the other only reads.

    `words`, int64 of `ring_shape`, are mapped by both; `flags` are of the same epoch.
    """

    def __init__(self, words: torch.Tensor, flags: StepFlags) -> None:
        self._flags = flags
        self._view = memoryview(words.numpy()).cast("B").cast("q")  # type: ignore[arg-type]
        self._num_words = words.shape[1]
        self._max_rows = (self._num_words - _HEADER) // ROW_WORDS
        self._num = 0

    @property
    def num_entries(self) -> int:
        """How many entries this end has written, or read."""
        return self._num

    def write(self, entry: StepEntry, *, timeout_s: float, is_over: Callable[[], bool]) -> None:
        """Announce `entry`.

        Raises `CacheRankLostError` if the ring stays full.
        """
        if len(entry.rows) > self._max_rows:
            raise ProtocolError(f"{len(entry.rows)} requests in a step, at most {self._max_rows}")
        number = self._num + 1
        oldest = number - NUM_ENTRIES
        if oldest > 0 and not self._flags.wait(
            CONSUMED, oldest, timeout_s=timeout_s, is_over=is_over
        ):
            raise CacheRankLostError("the cache rank does not read its announcements")
        words = entry.words()
        first = number % NUM_ENTRIES * self._num_words
        struct.pack_into(f"{len(words)}q", self._view, first * 8, *words)
        self._num = number
        if not reach("ring.write"):
            self._flags.raise_to(ANNOUNCED, number)

    def read(
        self, *, timeout_s: float, is_over: Callable[[], bool], awake_until: float = 0.0
    ) -> StepEntry | None:
        """Return the next entry, or None if there is none within `timeout_s`.

        The other arguments are those of `StepFlags.wait`. Raises `ProtocolError` if the entry is
        malformed; if one of its requests is, asking for them does.
        """
        number = self._num + 1
        if not self._flags.wait(
            ANNOUNCED, number, timeout_s=timeout_s, is_over=is_over, awake_until=awake_until
        ):
            return None
        seen_ns = time.monotonic_ns()
        first = number % NUM_ENTRIES * self._num_words
        entry = StepEntry.of(self._view[first : first + self._num_words], seen_ns=seen_ns)
        self._num = number
        reach("ring.read")
        self._flags.raise_to(CONSUMED, number)
        return entry
