# SPDX-License-Identifier: Apache-2.0
"""What travels between two pumps: records, many to a message.

A message is ``count``, then four numbers for each record, then their contents; each content begins
at a multiple of 16 bytes, so that it can be read in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch

from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.message.data_plane import DataPlane

PIECE_BYTES = 8 << 20
"""Contents are cut so that none is much longer: a message has to fit, and others wait behind it."""
_ALIGN, _WORDS = 16, 4


class Op(IntEnum):
    """What a record does at the other end; `a` and `b` are its two numbers."""

    TABLE = 1
    """Slots ``[n]`` int32 of row `a`, which is to be taken up."""
    SLOTS = 2
    """Slots ``[n]`` int32 that later `KV` records of this direction count."""
    WANT = 3
    """Slots ``[n]`` int32 whose K/V the inference rank's host has no more."""
    ENTRY = 4
    """The announcement of a step, int64."""
    KV = 5
    """K and V ``[2, n, H, D]`` of layer `a`, at the `SLOTS` from number `b`."""
    MESSAGE = 6
    """The next message of a step's plan: step `a` if it is to be taken, and `b` rows that change
    per KV head."""
    RAISE = 7
    """Raise flag `a` to `b`."""
    END = 8
    """All of step `a` was sent."""
    SET = 9
    """K and V ``[2, n, H, D]`` of slots of a resident set in layer `a`, from slot `b` on; those of
    a row are behind the R slots of each row before it."""
    WEIGHTS = 10
    """Weights of samples ``[H, num_samples]`` of row `b` in layer `a`."""
    TENSOR = 11
    """Bytes of the `a`-th tensor that both ends hold, from byte `b`."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record; `content` is ``[n]`` uint8."""

    op: Op
    a: int
    b: int
    content: torch.Tensor

    def view(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Return the content as a tensor; raises `ProtocolError` if it does not fit."""
        try:
            return self.content.view(dtype).view(shape)
        except RuntimeError as error:
            raise ProtocolError(
                f"{self.op.name} of {len(self.content)} bytes is no {dtype}{list(shape)}"
            ) from error


class Outbox:
    """Collects records and sends them in order. Used by one thread.

    `note_sent` is called after each message, which the other end has by then.
    """

    def __init__(self, plane: DataPlane, note_sent: Callable[[], None] = lambda: None) -> None:
        self._plane, self._note_sent = plane, note_sent
        self._heads: list[int] = []
        self._contents: list[torch.Tensor] = []
        self._nbytes = 0

    def put(self, op: Op, a: int = 0, b: int = 0, content: torch.Tensor | None = None) -> None:
        """Add a record; what it holds is copied. Sends what there is if that has become long."""
        content = _NOTHING if content is None else content
        found = content.cpu().contiguous().view(-1).view(torch.uint8)
        self._heads += (int(op), a, b, len(found))
        if found.data_ptr() == content.data_ptr():
            found = found.clone()
        self._contents.append(found)
        self._nbytes += len(found) + _ALIGN
        if self._nbytes >= PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send what was put."""
        if not self._heads:
            return
        count = len(self._contents)
        first = _aligned(8 * (1 + _WORDS * count))
        sizes = [_aligned(len(content)) for content in self._contents]
        body = torch.zeros(first + sum(sizes), dtype=torch.uint8)
        body[: 8 * (1 + len(self._heads))].view(torch.int64).copy_(
            torch.tensor([count, *self._heads])
        )
        for content, size in zip(self._contents, sizes, strict=True):
            body[first : first + len(content)] = content
            first += size
        self._heads, self._contents, self._nbytes = [], [], 0
        self._plane.send(body)
        self._note_sent()


def read_records(body: torch.Tensor) -> list[Record]:
    """Return the records of a message ``[n]`` uint8; `ProtocolError` if they are not whole."""
    count = int(body[:8].view(torch.int64)[0]) if len(body) >= 8 else -1
    start = 8 * (1 + _WORDS * count)
    if count < 1 or start > len(body):
        raise ProtocolError(f"a message of {len(body)} bytes names {count} records")
    heads = body[8:start].view(torch.int64).view(count, _WORDS).tolist()
    found, first = [], _aligned(start)
    for number, a, b, size in heads:
        if number not in _OPS or size < 0 or first + size > len(body):
            raise ProtocolError(f"record {number} of {size} bytes is unknown or out of bounds")
        found.append(Record(Op(number), a, b, body[first : first + size]))
        first += _aligned(size)
    return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


_NOTHING = torch.empty(0, dtype=torch.uint8)
_OPS = frozenset(Op)
