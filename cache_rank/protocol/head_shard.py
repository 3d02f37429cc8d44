# SPDX-License-Identifier: Apache-2.0
"""Which KV heads of an inference rank one of its cache ranks has."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HeadShard:
    """One of `count` equal parts of heads, in their order; by default all heads."""

    index: int = 0
    count: int = 1
    """``0 <= index < count``."""

    @classmethod
    def of_rank(cls, rank: int, count: int) -> HeadShard:
        """Return the part of cache rank `rank`, of `count` that each inference rank has."""
        return cls(rank % count, count)

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this part of `tensor` along `dim`, a view; `count` divides its size there."""
        if self.count == 1:
            return tensor
        size = tensor.shape[dim] // self.count
        return tensor.narrow(dim, self.index * size, size)


def parts_of(count: int) -> tuple[HeadShard, ...]:
    """Return all of `count` parts."""
    return tuple(HeadShard(index, count) for index in range(count))
