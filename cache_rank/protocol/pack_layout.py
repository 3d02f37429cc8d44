# SPDX-License-Identifier: Apache-2.0
"""Byte layout of a layer pack: which resident slots change, and the K/V rows to put there."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from tandemkv.kernels.placing import place

from .errors import ProtocolError

_ALIGN = 16
_MAGIC = 0x544B5650  # "TKVP"
NUM_HEADER_WORDS = 8
_NUM_HEAD_PARTS = 3


class PackHeader(NamedTuple):
    """Identity of a pack: `seq` counts the packs of an epoch, from 1."""

    epoch: int
    step_id: int
    seq: int


class PackViews(NamedTuple):
    """Views into a pack's buffer. L layers, S sparse requests, H KV heads, C fetch cap, D dim.

    Entries beyond the number of fetched rows hold position and slot ``-1``; the entries of a
    head are best first.
    """

    header: torch.Tensor  # [8] int64
    rows: torch.Tensor  # [S] int32
    generations: torch.Tensor  # [S] int64
    fetch_pos: torch.Tensor  # [L, S, H, C] int32, logical positions
    fetch_slot: torch.Tensor  # [L, S, H, C] int32, resident slots
    k: torch.Tensor  # [L, S, H, C, D]
    v: torch.Tensor  # [L, S, H, C, D]
    log_weight: torch.Tensor  # [L, S, H, num_samples] float32; NaN leaves what was sent before


class PackHead(NamedTuple):
    """What a pack says about itself, on the host."""

    header: PackHeader
    rows: list[int]
    generations: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLayout:
    """Offsets of a pack of fixed capacity. Parts are 16-byte aligned."""

    num_layers: int
    num_rows: int
    num_kv_heads: int
    fetch_cap: int
    head_dim: int
    dtype: str
    num_samples: int = 0

    def _parts(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        entries = (self.num_layers, self.num_rows, self.num_kv_heads, self.fetch_cap)
        kv = getattr(torch, self.dtype)
        return [
            (torch.int64, (NUM_HEADER_WORDS,)),
            (torch.int32, (self.num_rows,)),
            (torch.int64, (self.num_rows,)),
            (torch.int32, entries),
            (torch.int32, entries),
            (kv, (*entries, self.head_dim)),
            (kv, (*entries, self.head_dim)),
            (torch.float32, (*entries[:3], self.num_samples)),
        ]

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return sum(_padded(dtype, shape) for dtype, shape in self._parts())

    @property
    def head_nbytes(self) -> int:
        """Bytes in front of the positions: header, rows and generations."""
        return sum(_padded(dtype, shape) for dtype, shape in self._parts()[:_NUM_HEAD_PARTS])

    def head(self, buffer: torch.Tensor) -> PackHead:
        """Return header, rows and generations of the first `head_nbytes` of a buffer.

        Raises
        ------
        ProtocolError
            If these bytes are not of a pack.
        """
        parts, offset = [], 0
        for dtype, shape in self._parts()[:_NUM_HEAD_PARTS]:
            size = prod(shape) * dtype.itemsize
            parts.append(buffer[offset : offset + size].view(dtype).tolist())
            offset += _padded(dtype, shape)
        words, rows, generations = parts
        return PackHead(_header_of(words), rows, generations)

    def views(self, buffer: torch.Tensor) -> PackViews:
        """Return the parts of `buffer`, ``[nbytes]`` uint8, without a copy.

        Raises
        ------
        ProtocolError
            If the buffer's size is not `nbytes`.
        """
        if buffer.dtype != torch.uint8 or buffer.shape != (self.nbytes,):
            raise ProtocolError(
                f"pack buffer {buffer.dtype}{tuple(buffer.shape)} must be uint8 ({self.nbytes},)"
            )
        parts, offset = [], 0
        for dtype, shape in self._parts():
            size = prod(shape) * dtype.itemsize
            parts.append(buffer[offset : offset + size].view(dtype).view(shape))
            offset += _padded(dtype, shape)
        return PackViews(*parts)


def write_header(views: PackViews, header: PackHeader) -> None:
    """Stamp a pack."""
    words = [_MAGIC, header.epoch, header.step_id, header.seq, 0, 0, 0, 0]
    views.header.copy_(place(words, views.header.device))


def read_header(views: PackViews) -> PackHeader:
    """Return the stamp of a pack.

    Raises
    ------
    ProtocolError
        If the buffer does not hold a pack.
    """
    return _header_of(views.header.tolist())


def _header_of(words: list[int]) -> PackHeader:
    if words[0] != _MAGIC:
        raise ProtocolError(f"not a pack: magic={words[0]:#x}")
    return PackHeader(epoch=words[1], step_id=words[2], seq=words[3])


def _padded(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
