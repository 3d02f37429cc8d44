# SPDX-License-Identifier: Apache-2.0
"""Difference between a selection and the resident set; called by the cache rank.

The mirror says which token sits in which resident slot. It is changed here and nowhere else, so the
cache rank always knows it.

Per head: selected positions that are resident are touched. The best of the others take the empty
slots (until `num_target` slots are filled), then the least recently used ones that are neither
protected nor touched in this step (of equal ones the lowest), first to first in the order of
`fetch_pos` and of slots. If fewer than `num_target` slots are filled after that, empty slots take
the highest positions of ``[lo, hi)`` that are not resident. At most `fetch_cap` slots are written;
each write counts as a touch.

Invariants, given that they hold before the call: no position is twice in a head; filled slots are a
prefix (no holes); all heads of a request have equally many filled slots, as long as `num_target` is
at most ``hi - lo`` plus the number of resident positions outside ``[lo, hi)``.
"""

from typing import NamedTuple

import torch

from tandemkv.kernels.check import BOOL, FLOAT32, INT8, INT32, INT64, INTS, Dims, check_counts, fail
from tandemkv.kernels.dispatch import resolve
from tandemkv.kernels.samples import check_num_samples

_NUM_COUNTERS = 3
_WORD_BITS = 32


class MirrorScratch(NamedTuple):
    """What `mirror_diff` works in on a GPU, from `make_mirror_scratch`."""

    bits: torch.Tensor
    """``[num_reqs, num_kv_heads, 2 * num_words]``, int32: a bit for each position."""
    places: torch.Tensor | None
    """``[num_reqs, num_kv_heads, num_words * 32]``, int32. Only needed without
    `selected_scores`."""


def make_mirror_scratch(
    num_reqs: int,
    num_kv_heads: int,
    max_context: int,
    device: torch.device | str,
    *,
    may_repeat: bool = True,
) -> MirrorScratch:
    """Allocate what `mirror_diff` works in on a GPU, to be shared by all layers.

    Parameters
    ----------
    num_reqs, num_kv_heads : int
        The largest of the calls that use it.
    max_context : int
        Above every position that is selected, resident or a filler.
    device : torch.device or str
        Theirs.
    may_repeat : bool
        Whether there are calls without `selected_scores`, where positions may be repeated. They
        take 17 times the memory.

    Returns
    -------
    MirrorScratch
        Content undefined.
    """
    num_words = max(1, -(-max_context // _WORD_BITS))

    def empty(size: int) -> torch.Tensor:
        return torch.empty((num_reqs, num_kv_heads, size), dtype=torch.int32, device=device)

    places = empty(num_words * _WORD_BITS) if may_repeat else None
    return MirrorScratch(empty(2 * num_words), places)


def mirror_diff(
    selected: torch.Tensor,
    resident_pos: torch.Tensor,
    last_used: torch.Tensor,
    *,
    step: int | torch.Tensor,
    num_protected: int,
    num_target: torch.Tensor,
    hi: torch.Tensor,
    lo: int,
    fetch_cap: int,
    selected_scores: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    log_weight: torch.Tensor | None = None,
    scratch: MirrorScratch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decide what to fetch into which resident slots, and update the mirror, as the module says.

    Parameters
    ----------
    selected : torch.Tensor
        ``[num_reqs, num_kv_heads, k]``, int32. Logical positions, best first; negative is padding,
        of a repeated position the first one counts.
    resident_pos : torch.Tensor
        ``[num_reqs, num_kv_heads, num_resident]``, int32. Position in each resident slot, ``-1``
        if empty. Updated in place. On a GPU at most 32767 slots.
    last_used : torch.Tensor
        As `resident_pos`, int32 or int64. Step of the last touch; start it below the first step
        (``-1``). Updated in place.
    step : int or torch.Tensor
        The step, or a tensor ``[]`` or ``[num_reqs]`` of int32 or int64. Not below any `last_used`;
        a graph captures an int as it is.
    num_protected : int
        Slots ``[0, num_protected)`` (the sink) are filled when empty, never overwritten.
    num_target : torch.Tensor
        ``[num_reqs]``, int32 or int64. How many slots have to be filled, over several steps if
        `fetch_cap` is less: ``min(num_resident, positions that may be resident)``.
    hi, lo : torch.Tensor, int
        ``[num_reqs]``, int32 or int64. End and begin of the positions used for filling.
    fetch_cap : int
        Slots written per head at most.
    selected_scores : torch.Tensor, optional
        As `selected`, float32. Then `selected` may be in any order, but its positions are distinct;
        best first is by these scores (NaN counts as ``-inf``; ties: the lower position).
    active : torch.Tensor, optional
        ``[num_reqs]``, bool or int8. Mirror and scratch of the other requests are left as they are,
        their results are ``-1`` everywhere.
    rows : torch.Tensor, optional
        ``[num_reqs]``, int64, distinct for active requests. Row of each request in `resident_pos`
        and `last_used`, which then are whole books ``[num_rows, ...]``. By default row i.
    counters : torch.Tensor, optional
        ``[>= 3]``, int64, contiguous. The call adds: selected positions that were resident, that
        were missing, slots written.
    log_weight : torch.Tensor, optional
        ``[num_reqs, num_kv_heads, num_samples]``, float32, with `rows` ``[num_rows, ...]``, dense
        in the last dimension; may be another GPU's memory. Written for active requests: with how
        much weight samples of the candidates ``[num_protected, hi)`` count (`kernels.samples`).
        What is not resident is shared out, by their spans, to the samples that are not either; the
        others have ``-inf``.
    scratch : MirrorScratch, optional
        From `make_mirror_scratch`, at least as large as the call. Required on a GPU, not looked at
        on CPU. Calls that share it must be on one stream.

    Returns
    -------
    fetch_pos, fetch_slot : torch.Tensor
        ``[num_reqs, num_kv_heads, fetch_cap]``, int32, padded with ``-1`` at the end. Positions to
        fetch: selected ones best first (with `selected_scores` in ascending order), then fillers
        from the highest. The resident slot of each: empty ones first, each kind ascending.
    """
    dims = Dims()
    dims.check("selected", selected, "num_reqs num_kv_heads k", INT32)
    _check_books(dims, resident_pos, last_used, rows, log_weight)
    _check_step(dims, step)
    dims.check("num_target", num_target, "num_reqs", INTS)
    dims.check("hi", hi, "num_reqs", INTS)
    check_counts(num_protected=num_protected, lo=lo, fetch_cap=fetch_cap)
    if selected_scores is not None:
        dims.check("selected_scores", selected_scores, "num_reqs num_kv_heads k", FLOAT32)
    if active is not None:
        dims.check("active", active, "num_reqs", BOOL + INT8)
    if counters is not None:
        dims.check("counters", counters, "num_counters", INT64)
        if len(counters) < _NUM_COUNTERS or not counters.is_contiguous():
            fail("counters.shape", tuple(counters.shape), f"[>= {_NUM_COUNTERS}], contiguous")
    if scratch is not None:
        _check_scratch(dims, scratch, selected)
    run = resolve("mirror", "mirror_diff", selected.device)
    options = {
        "selected_scores": selected_scores, "active": active, "rows": rows, "counters": counters,
        "log_weight": log_weight, "scratch": scratch,
    }  # fmt: skip
    fetch: tuple[torch.Tensor, torch.Tensor] = run(
        *(selected, resident_pos, last_used), step=step, num_protected=num_protected,
        num_target=num_target, hi=hi, lo=lo, fetch_cap=fetch_cap, **options,
    )  # fmt: skip
    return fetch


def _check_books(
    dims: Dims,
    resident_pos: torch.Tensor,
    last_used: torch.Tensor,
    rows: torch.Tensor | None,
    log_weight: torch.Tensor | None,
) -> None:
    book = "num_reqs" if rows is None else "num_rows"
    dims.check("resident_pos", resident_pos, f"{book} num_kv_heads num_resident", INT32)
    dims.check("last_used", last_used, f"{book} num_kv_heads num_resident", INTS)
    if rows is not None:
        dims.check("rows", rows, "num_reqs", INT64)
    if log_weight is not None:
        dims.check("log_weight", log_weight, f"{book} num_kv_heads num_samples", FLOAT32)
        check_num_samples(log_weight.shape[-1])
        if log_weight.stride(-1) != 1:
            fail("log_weight.stride(-1)", log_weight.stride(-1), "1")


def _check_step(dims: Dims, step: int | torch.Tensor) -> None:
    if isinstance(step, torch.Tensor):
        if step.dim() > 1:
            fail("step.shape", tuple(step.shape), "[] or [num_reqs]")
        dims.check("step", step, "num_reqs" if step.dim() else "", INTS)


def _check_scratch(dims: Dims, scratch: MirrorScratch, selected: torch.Tensor) -> None:
    least = tuple(selected.shape[:2])
    for name, part in zip(scratch._fields, scratch, strict=True):
        if part is None:
            continue
        dims.check(f"scratch.{name}", part, f"scratch_reqs scratch_heads {name}", INT32)
        if any(have < need for have, need in zip(part.shape, least, strict=False)):
            fail(f"scratch.{name}.shape", tuple(part.shape), f"at least {least}")
        if part.stride(-1) != 1:
            fail(f"scratch.{name}.stride(-1)", part.stride(-1), "1")
