# SPDX-License-Identifier: Apache-2.0
"""Access to the rows of a pool without copies where slots are contiguous."""

from collections.abc import Iterator
from itertools import pairwise

import torch

from tandemkv.kernels.check import fail

# Below this mean length of a run, one gather costs less than a product per run.
_MIN_MEAN_RUN_LEN = 512
# Bounds what a gather or an upcast copies at a time (16 MiB at 8 heads x 128, fp32).
_MAX_SEGMENT_LEN = 4096


def segments(
    slots: torch.Tensor, num_slots: int
) -> Iterator[tuple[int, int, slice | torch.Tensor]]:
    """Split slots ``[n]`` in logical order, on a CPU, into pieces that index a pool.

    Yields the bounds of each piece ``slots[start:end]``, and what to index with: a slice (a view,
    no copy) within a contiguous ascending run, an int64 tensor where runs are short. Raises
    `ValueError` if a slot is outside ``[0, num_slots)``.
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


def slots_of(table: torch.Tensor, lo: int, hi: int, page_size: int) -> torch.Tensor:
    """Return the slots ``[hi - lo]`` of positions of one request, ``table [num_pages]`` its pages.

    A view of `table` if `page_size` is 1, else int64.
    """
    if page_size == 1:
        return table[lo:hi]
    positions = torch.arange(lo, hi, device=table.device)
    return table[positions // page_size].long() * page_size + positions % page_size


def rows_at(pool: torch.Tensor, index: slice | torch.Tensor) -> torch.Tensor:
    """Return rows ``[n, ...]`` of a pool: a view for a slice, else a copy.

    ``pool[index]`` copies an element at a time on a CPU, an eighth as fast.
    """
    return pool[index] if isinstance(index, slice) else pool.index_select(0, index)


def key_rows(
    k_pool: torch.Tensor, index: slice | torch.Tensor, k_scale: torch.Tensor | None
) -> torch.Tensor:
    """Read keys of any kind of `tandemkv.kernels.score`, dequantized.

    ``[n, num_kv_heads, head_dim]`` float32; `index` is a slice of slots, or ``[n]`` int64.
    """
    if k_pool.dtype != torch.uint8 or k_scale is None:
        keys = rows_at(k_pool, index).float()
        return keys if k_scale is None else keys * rows_at(k_scale, index).float().unsqueeze(-1)
    page_size = k_pool.shape[2]
    if isinstance(index, slice):
        index = torch.arange(index.start, index.stop, device=k_pool.device)
    page = index // page_size
    codes = k_pool[page, :, index % page_size]  # [n, H, D/2]
    keys = torch.cat([codes & 15, codes >> 4], dim=-1).float()
    step, zero = rows_at(k_scale, page).float().unbind(2)  # [n, H, D]
    return torch.addcmul(zero, keys, step)


def num_slots_of(k_pool: torch.Tensor) -> int:
    """Return how many tokens a pool of any kind holds."""
    return k_pool.shape[0] * (k_pool.shape[2] if k_pool.dtype == torch.uint8 else 1)


def key_logits(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply grouped queries with the keys of one request at `slots` ``[n]``.

    ``[num_kv_heads, m, n]`` float32 for `q` ``[num_kv_heads, m, head_dim]`` float32, already
    scaled; keys are of any kind of `tandemkv.kernels.score`. Raises `ValueError` if a slot is
    outside the pool.
    """
    logits = q.new_empty((q.shape[0], q.shape[1], slots.numel()))
    for start, end, index in segments(slots, num_slots_of(k_pool)):
        keys = key_rows(k_pool, index, k_scale)
        logits[..., start:end] = torch.bmm(q, keys.permute(1, 2, 0))
    return logits
