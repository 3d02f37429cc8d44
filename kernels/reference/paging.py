# SPDX-License-Identifier: Apache-2.0
"""Access to the rows of a pool without copies where slots are contiguous."""

from collections.abc import Iterator
from itertools import pairwise

import torch

from tandemkv.kernels.check import fail

# Below this mean length of a run, one gather costs less than a product per run.
_MIN_MEAN_RUN_LEN = 128
# Bounds what a gather or an upcast copies at a time (16 MiB at 8 heads x 128, fp32).
_MAX_SEGMENT_LEN = 4096


def segments(
    slots: torch.Tensor, num_slots: int
) -> Iterator[tuple[int, int, slice | torch.Tensor]]:
    """Split a list of slots into pieces that index a pool.

    Parameters
    ----------
    slots : torch.Tensor
        ``[n]``, int32 or int64, cpu. Physical slots in logical order.
    num_slots : int
        Size of the pool.

    Yields
    ------
    start, end : int
        The piece covers ``slots[start:end]``; pieces are in order and disjoint.
    index : slice or torch.Tensor
        What to index the pool with: a slice (a view, no copy) within a
        contiguous ascending run, an int64 tensor where runs are short.

    Raises
    ------
    ValueError
        If a slot is outside ``[0, num_slots)``.
    """
    num_rows = slots.numel()
    if num_rows == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(slots))
    if low < 0 or high >= num_slots:
        fail("slots", f"[{low}..{high}]", f"in [0, num_slots={num_slots})")
    breaks = torch.nonzero(slots[1:] - slots[:-1] != 1).flatten() + 1
    has_long_runs = num_rows >= _MIN_MEAN_RUN_LEN * breaks.numel()
    bounds = [0, *breaks.tolist(), num_rows] if has_long_runs else [0, num_rows]
    for first, last in pairwise(bounds):
        for start in range(first, last, _MAX_SEGMENT_LEN):
            end = min(start + _MAX_SEGMENT_LEN, last)
            if has_long_runs:
                slot = int(slots[start])
                yield start, end, slice(slot, slot + end - start)
            else:
                yield start, end, slots[start:end].long()


def key_logits(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply grouped queries with the keys of one request.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_kv_heads, m, head_dim]``, float32, already scaled.
    k_pool : torch.Tensor
        ``[num_slots, num_kv_heads, head_dim]``, any float dtype or int8.
    slots : torch.Tensor
        ``[n]``, physical slots.
    k_scale : torch.Tensor, optional
        ``[num_slots, num_kv_heads]``, the scales of int8 keys.

    Returns
    -------
    torch.Tensor
        ``[num_kv_heads, m, n]``, float32.

    Raises
    ------
    ValueError
        If a slot is outside the pool.
    """
    logits = q.new_empty((q.shape[0], q.shape[1], slots.numel()))
    for start, end, index in segments(slots, k_pool.shape[0]):
        keys = k_pool[index].float().permute(1, 2, 0)  # [H, D, n]
        part = torch.bmm(q, keys)
        if k_scale is not None:
            part *= k_scale[index].float().t().unsqueeze(1)
        logits[..., start:end] = part
    return logits
