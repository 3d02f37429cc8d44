# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks agree on what each of them measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def all_reduce_max(group: dist.ProcessGroup | None, figures: Sequence[float]) -> list[float]:
    """Return for each figure the largest of any rank, the same on all of them.

    Every rank of `group`, which is of CPUs, calls this with as many figures; without one there is
    one rank. ``inf`` is larger than all; NaN is not allowed.
    """
    if group is None or group.size() == 1:
        return list(figures)
    values = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    found: list[float] = values.tolist()
    return found
