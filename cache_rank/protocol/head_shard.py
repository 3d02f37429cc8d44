# SPDX-License-Identifier: Apache-2.0
"""Which KV heads of an inference rank one of its cache ranks has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # who reads shapes of models alone needs no torch
    import torch


@dataclass(frozen=True, slots=True)
class HeadShard:
    """One of `count` parts of `num_heads` KV heads, in their order; by default all heads.

    Parts are as equal as can be: `count` need not divide `num_heads`. Query heads go with their KV
    head.
    """

    index: int = 0
    count: int = 1
    """``0 <= index < count <= num_heads``."""
    num_heads: int = 1
    """KV heads of all parts together; with one part the number does not matter."""
    before: int = 0
    """KV heads of the model before those, which other tensor-parallel ranks have."""

    @property
    def bounds(self) -> tuple[int, int]:
        """First KV head of this part, and the first behind it."""
        return part_bounds(self.index, self.count, self.num_heads)

    def heads(self, count: int) -> range:
        """Return which KV heads of the model the `count` of this part are."""
        start = self.before + (self.bounds[0] if self.count > 1 else 0)
        return range(start, start + count)

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this part of `tensor` along `dim`, a view; `num_heads` divides its size there."""
        if self.count == 1:
            return tensor
        each = tensor.shape[dim] // self.num_heads
        start, end = self.bounds
        return tensor.narrow(dim, start * each, (end - start) * each)

    def part(self, size: int) -> int:
        """Return how much of `size`, which `num_heads` divides, is this part's."""
        start, end = self.bounds
        return size // self.num_heads * (end - start) if self.count > 1 else size

    def whole(self, size: int) -> int:
        """Return of what `size` is this part: the inverse of `part`."""
        start, end = self.bounds
        return size // (end - start) * self.num_heads if self.count > 1 else size


def parts_of(count: int, num_heads: int) -> tuple[HeadShard, ...]:
    """Return all of `count` parts of `num_heads` KV heads."""
    return tuple(HeadShard(index, count, num_heads) for index in range(count))


def part_bounds(index: int, count: int, size: int) -> tuple[int, int]:
    """Return where part `index` of `count` consecutive ones of `size` things begins and ends."""
    return index * size // count, (index + 1) * size // count
