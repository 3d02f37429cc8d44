# SPDX-License-Identifier: Apache-2.0
"""Difference between a selection and the resident set; called by the cache rank.

The mirror says which token sits in which resident slot. It is changed here and nowhere else, so the
cache rank always knows it.

Per head: selected positions that are resident are touched. The best of the others take the empty
slots (until `num_target` slots are filled), then the least recently used ones that are neither
protected nor touched in this step (of equal ones the lowest), first to first in the order of
`fetch_pos` and of slots. If fewer than `num_target` slots are filled after that, empty slots take
the highest positions below `hi` that are not resident. At most `fetch_cap` slots are written;
each write counts as a touch. Steps of 32 bits wrap around: what was used `MAX_AGE` steps ago, or
earlier, is as old as can be.

Invariants, given that they hold before the call: no position is twice in a head; filled slots are a
prefix (no holes); all heads of a request have equally many filled slots, as long as `num_target` is
at most `hi` plus the number of resident positions from there on.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from tandemkv.kernels.check import BOOL, FLOAT32, INT8, INT32, INT64, INTS, Dims, check_counts, fail
from tandemkv.kernels.dispatch import uses_triton
from tandemkv.kernels.samples import check_num_samples, sample_weights

MAX_RESIDENT = 32767
"""Slots of a KV head at most, on a GPU: in its kernel two counts of slots share 32 bits."""

MAX_AGE = 2**31 - 2
"""Of a slot, in steps since it was last used. One of a later step, by difference, has it too."""

_NUM_COUNTERS = 3
_WORD_BITS = 32
_INT64 = torch.iinfo(torch.int64)


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
    """Allocate what `mirror_diff` works in on a GPU, for the largest call, shared by all layers.

    `max_context` is above every position that is selected, resident or a filler. `may_repeat`:
    there are calls without `selected_scores`, where positions may be repeated. They take 17 times
    the memory. What stands in it is undefined.
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
    step: torch.Tensor,
    num_protected: int,
    num_target: torch.Tensor,
    hi: torch.Tensor,
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
        if empty. Updated in place. On a GPU at most `MAX_RESIDENT` slots.
    last_used : torch.Tensor
        As `resident_pos`, int32 or int64. Step of the last touch; start it below the first step
        (``-1``). Updated in place.
    step : torch.Tensor
        ``[]``, int32 or int64. Not below any `last_used`, by their difference, which wraps around.
    num_protected : int
        Slots ``[0, num_protected)`` (the sink) are filled when empty, never overwritten.
    num_target : torch.Tensor
        ``[num_reqs]``, int32 or int64. How many slots have to be filled, over several steps if
        `fetch_cap` is less: ``min(num_resident, positions that may be resident)``.
    hi : torch.Tensor
        ``[num_reqs]``, int32 or int64. End of the positions used for filling.
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
        From `make_mirror_scratch`, at least as large as the call. Required on a GPU, not written
        on a CPU. Calls that share it must be on one stream.

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
    dims.check("step", step, "", INTS)
    dims.check("num_target", num_target, "num_reqs", INTS)
    dims.check("hi", hi, "num_reqs", INTS)
    check_counts(num_protected=num_protected, fetch_cap=fetch_cap)
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
        if selected_scores is None and scratch.places is None:
            fail("selected_scores", None, "given, or the scratch made with may_repeat=True")
    if uses_triton(selected.device):
        from tandemkv.kernels.triton_ops.mirror import mirror_diff as on_gpu

        return on_gpu(
            selected, resident_pos, last_used, step=step, num_protected=num_protected,
            num_target=num_target, hi=hi, fetch_cap=fetch_cap,
            selected_scores=selected_scores, active=active, rows=rows, counters=counters,
            log_weight=log_weight, scratch=scratch,
        )  # fmt: skip
    is_sorted = selected_scores is not None
    if selected_scores is not None:
        selected = _best_first(selected, selected_scores)
    chosen = torch.arange(len(selected), device=selected.device)
    if active is not None:
        chosen = active.nonzero().view(-1)
    books = chosen if rows is None else rows[chosen]
    some_pos, some_used = resident_pos[books], last_used[books]
    fetch = _diff(
        selected[chosen], some_pos, some_used, step.to(last_used.dtype), num_protected,
        num_target[chosen], hi[chosen], fetch_cap, counters, is_sorted,
    )  # fmt: skip
    resident_pos[books], last_used[books] = some_pos, some_used
    if log_weight is not None:
        num_samples = log_weight.shape[-1]
        log_weight[books] = sample_weights(some_pos, hi[chosen], num_protected, num_samples)
    fetch_pos, fetch_slot = (
        part.new_full((*selected.shape[:2], fetch_cap), -1).index_copy_(0, chosen, part)
        for part in fetch
    )
    return fetch_pos, fetch_slot


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


def _find(selected: torch.Tensor, resident_pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slot of each selected position, -1 if none, and which are to be fetched."""
    num_slots = resident_pos.shape[-1]
    missing = selected >= 0
    found = torch.full_like(selected, -1, dtype=torch.int64)
    if num_slots:
        ordered, slot_of = torch.sort(resident_pos, dim=-1)
        place = torch.searchsorted(ordered, selected.contiguous()).clamp_(max=num_slots - 1)
        is_resident = missing & (ordered.gather(-1, place) == selected)
        found = torch.where(is_resident, slot_of.gather(-1, place), -1)
        missing &= ~is_resident
    ranked, rank_of = torch.sort(selected, dim=-1, stable=True)
    is_repeated = torch.zeros_like(missing)
    is_repeated[..., 1:] = ranked[..., 1:] == ranked[..., :-1]
    missing &= ~torch.zeros_like(missing).scatter_(-1, rank_of, is_repeated)
    return found, missing


def _compact(
    values: torch.Tensor, keep: torch.Tensor, offset: torch.Tensor, out: torch.Tensor
) -> None:
    """Write kept values, in order, to ``out[offset:]``; what does not fit is dropped."""
    size = out.shape[-1]
    target = torch.where(keep, keep.cumsum(-1) - 1 + offset, size).clamp_(max=size)
    padded = torch.cat([out, out.new_empty((*out.shape[:-1], 1))], dim=-1)
    padded.scatter_(-1, target, values.to(out.dtype))
    out.copy_(padded[..., :size])


def _fillers(
    resident_pos: torch.Tensor, hi: torch.Tensor, count: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions from the highest, and which of them are the `count` best non-resident."""
    # As many positions as are resident can be taken, so this reach holds `size` free ones.
    reach = resident_pos.shape[-1] + size
    last = hi[:, None, None].long() - 1
    back = torch.where(resident_pos >= 0, last - resident_pos, reach)
    back = torch.where((back >= 0) & (back < reach), back, reach)
    taken = torch.zeros(
        (*resident_pos.shape[:-1], reach + 1), dtype=torch.bool, device=resident_pos.device
    ).scatter_(-1, back, value=True)
    positions = last - torch.arange(reach, device=resident_pos.device)  # [B, 1, reach]
    is_free = ~taken[..., :reach] & (positions >= 0)
    return positions.expand_as(is_free), is_free & (is_free.cumsum(-1) <= count)


def _best_first(selected: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Order positions by score, of equal ones the lower first; padding may end anywhere."""
    by_position = selected.sort(dim=-1, stable=True)
    selected, scores = by_position.values, scores.gather(-1, by_position.indices)
    scores = torch.where(scores.isnan(), float("-inf"), scores)
    return selected.gather(-1, scores.argsort(dim=-1, descending=True, stable=True))


def _diff(
    selected: torch.Tensor,
    resident_pos: torch.Tensor,
    last_used: torch.Tensor,
    now: torch.Tensor,
    num_protected: int,
    num_target: torch.Tensor,
    hi: torch.Tensor,
    fetch_cap: int,
    counters: torch.Tensor | None,
    is_sorted: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Update the mirror of all requests, at the step ``now []``.

    With `is_sorted` what was missing is fetched in the order of positions.
    """
    num_reqs, num_kv_heads, num_slots = resident_pos.shape
    shape = (num_reqs, num_kv_heads, min(fetch_cap, num_slots))
    found, missing = _find(selected, resident_pos)
    touched = selected.new_zeros((num_reqs, num_kv_heads, num_slots + 1), dtype=torch.bool)
    touched.scatter_(-1, torch.where(found >= 0, found, num_slots), value=True)
    last_used.copy_(torch.where(touched[..., :num_slots], now, last_used))
    slot_order, may_fill, num_open = _free_slots(
        resident_pos, last_used, now, num_protected, num_target, shape[-1]
    )
    fetch_pos = selected.new_full(shape, -1)
    num_missing = missing.sum(-1, keepdim=True)
    _compact(selected, missing, torch.zeros_like(num_missing), fetch_pos)
    num_taken = torch.minimum(num_missing, num_open)
    column = torch.arange(shape[-1], device=selected.device)
    fetch_pos.masked_fill_(column >= num_taken, -1)
    if is_sorted:
        fetch_pos = _ascending(fetch_pos)
    num_fill = torch.minimum(may_fill.sum(-1, keepdim=True), num_open) - num_taken
    if bool((num_fill > 0).any()):
        # The new ones are resident already; nothing is evicted where there is room.
        occupied = torch.cat([resident_pos, fetch_pos], dim=-1)
        positions, chosen = _fillers(occupied, hi, num_fill, shape[-1])
        _compact(positions, chosen, num_taken, fetch_pos)

    is_fetched = fetch_pos >= 0
    slot_order = _in_order(slot_order, may_fill, is_fetched, num_slots)
    fetch_slot = torch.where(is_fetched, slot_order, -1).to(torch.int32)
    if counters is not None:
        counters[:3] += torch.stack(((found >= 0).sum(), missing.sum(), is_fetched.sum()))
    _write(resident_pos, slot_order, fetch_pos, is_fetched)
    _write(last_used, slot_order, now.expand(shape), is_fetched)
    room = (0, max(0, fetch_cap - num_slots))
    return pad(fetch_pos, room, value=-1), pad(fetch_slot, room, value=-1)


def _in_order(
    slot_order: torch.Tensor, may_fill: torch.Tensor, is_fetched: torch.Tensor, num_slots: int
) -> torch.Tensor:
    """Return the slots to be written, those that are not last.

    Empty ones are in their order already; of the others those that are taken follow in theirs.
    """
    column = torch.arange(slot_order.shape[-1], device=slot_order.device)
    place = torch.where(may_fill.gather(-1, slot_order), column, num_slots + slot_order)
    place = torch.where(is_fetched, place, 2 * num_slots + column)
    return slot_order.gather(-1, place.argsort(dim=-1))


def _ascending(positions: torch.Tensor) -> torch.Tensor:
    """Sort positions, padding of -1 last."""
    last = torch.iinfo(positions.dtype).max
    found = torch.where(positions < 0, last, positions).sort(dim=-1).values
    return found.masked_fill_(found == last, -1)


def _free_slots(
    resident_pos: torch.Tensor,
    last_used: torch.Tensor,
    now: torch.Tensor,
    num_protected: int,
    num_target: torch.Tensor,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `most` slots in the order in which they are given away.

    With them, which slots are empty and may be filled, and how many of the first may be taken.
    """
    is_empty = resident_pos < 0
    num_filled = resident_pos.shape[-1] - is_empty.sum(-1, keepdim=True)
    room = (num_target[:, None, None] - num_filled).clamp_(min=0)
    may_fill = is_empty & (is_empty.cumsum(-1) <= room)
    may_evict = ~is_empty & (last_used != now)
    may_evict[..., :num_protected] = False
    age = (now - last_used).long()  # steps of 32 bits wrap around, and so does this
    age = torch.where(age < 0, MAX_AGE, age).clamp_(max=MAX_AGE)
    order = torch.where(may_evict, -age, _INT64.max)
    order = torch.where(may_fill, _INT64.min, order)
    num_open = (may_fill | may_evict).sum(-1, keepdim=True).clamp_(max=most)
    return torch.argsort(order, dim=-1, stable=True)[..., :most], may_fill, num_open


def _write(
    state: torch.Tensor, slot: torch.Tensor, value: torch.Tensor, keep: torch.Tensor
) -> None:
    """Set distinct slots to the values to keep, in place."""
    state.scatter_(-1, slot, torch.where(keep, value, state.gather(-1, slot)))
