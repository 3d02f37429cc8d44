# SPDX-License-Identifier: Apache-2.0
"""Tables that the kernels of a decode step read, filled from the step's rows and lengths."""

from dataclasses import dataclass

import torch

from tandemkv.kernels.check import BOOL, INT32, INT64, INTS, Dims, check_counts, check_int, fail
from tandemkv.kernels.dispatch import uses_triton
from tandemkv.kernels.slot_rules import latest_slots


@dataclass(eq=False, kw_only=True)
class CandidateTables:
    """What `load_candidates` fills; checked once, because every step passes it."""

    rows: torch.Tensor
    positions: torch.Tensor
    """``[max_batch]``, int64. Row of each request, and position of its newest token."""
    lengths: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    num_target: torch.Tensor
    """``[max_batch]``, int32. Tokens, candidates ``[lo, hi)``, resident slots to be filled."""
    active: torch.Tensor
    """``[max_batch]``, bool. Whether a selection is made for the request."""
    pages: torch.Tensor
    """``[max_batch, max_pages]``, int32. Page that each run of `page_size` positions lies in."""
    step: torch.Tensor
    selections: torch.Tensor
    """``[]``, int32 and int64. Steps loaded (it wraps around), and selections they ask for."""

    def __post_init__(self) -> None:
        dims = Dims()
        for name in ("rows", "positions"):
            dims.check(name, getattr(self, name), "max_batch", INT64)
        for name in ("lengths", "lo", "hi", "num_target"):
            dims.check(name, getattr(self, name), "max_batch", INT32)
        dims.check("active", self.active, "max_batch", BOOL)
        dims.check("pages", self.pages, "max_batch max_pages", INT32)
        dims.check("step", self.step, "", INT32)
        dims.check("selections", self.selections, "", INT64)
        for name in ("rows", "positions", "lengths", "lo", "hi", "num_target", "active", "pages"):
            if not getattr(self, name).is_contiguous():
                fail(f"{name}.stride()", getattr(self, name).stride(), "contiguous")


def load_attended(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    slots: torch.Tensor,
    attended: torch.Tensor,
    *,
    num_resident: int,
    num_recent: int,
    num_dense: int,
    first_slot: int,
) -> None:
    """List the slots that each request attends to, resident sets being the pool's tail.

    A request of up to `num_dense` tokens attends to all of them. A longer one attends to
    ``min(length, num_resident + num_recent)``: its ``min(num_resident, length - num_recent)``
    resident slots, ``first_slot + row * num_resident`` and following, then its latest tokens
    where the pool has them. Row 0, that of padding, has no resident slots.

    Parameters
    ----------
    rows, lengths : torch.Tensor
        ``[num_reqs]``, int32 or int64. Row of each request, and its tokens.
    req_to_token : torch.Tensor
        ``[num_rows, context]``, int32 or int64. Slot of each position.
    slots : torch.Tensor
        ``[max_batch, width]``, int32. Of the first `num_reqs` rows as many columns are written
        as `attended` says; `width` is at least that.
    attended : torch.Tensor
        ``[max_batch]``, int64. The number of slots; the first `num_reqs` are written.
    num_resident, num_recent, num_dense, first_slot : int
        See above.
    """
    dims = _check_attended(rows, lengths, slots, attended)
    dims.check("req_to_token", req_to_token, "num_rows context", INTS)
    check_int("context", dims["context"], minimum=1)
    _check_sizes(num_resident, num_recent, num_dense)
    check_int("first_slot", first_slot, minimum=0)
    if uses_triton(slots.device):
        from tandemkv.kernels.triton_ops.step_tables import load_attended as on_gpu

        return on_gpu(
            rows, lengths, req_to_token, slots, attended, num_resident=num_resident,
            num_recent=num_recent, num_dense=num_dense, first_slot=first_slot,
        )  # fmt: skip
    size, rows, lengths = len(rows), rows.long()[:, None], lengths.long()[:, None]
    column = torch.arange(slots.shape[1], device=slots.device)
    count = _attended(lengths, num_resident + num_recent, num_dense)
    filled = (lengths - num_recent).clamp(0, num_resident)
    is_sparse = (lengths > num_dense) & (rows != 0)
    positions = (lengths - count + column).clamp(min=0, max=req_to_token.shape[1] - 1)
    in_pool = req_to_token[rows, positions]
    resident = first_slot + rows * num_resident + column
    found = torch.where(is_sparse & (column < filled), resident, in_pool).to(slots.dtype)
    slots[:size] = torch.where(column < count, found, slots[:size])
    attended[:size] = count[:, 0]


def load_ring(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    attended: torch.Tensor,
    set_rows: torch.Tensor,
    write_slots: torch.Tensor,
    *,
    num_resident: int,
    num_recent: int,
    num_dense: int,
) -> None:
    """List the slots that each request attends to, resident sets being tensors of their own.

    As `load_attended`, with ``row * width`` and following for the slots of a request, `width`
    that of `slots`. The token at position ``p`` is at ``p`` while all tokens are attended to and
    ``p < num_resident``, and else in the ring behind, at
    ``num_resident + (p - num_resident) mod num_recent``.

    Parameters
    ----------
    rows, lengths, slots, attended, num_resident, num_recent, num_dense
        See `load_attended`.
    set_rows, write_slots : torch.Tensor
        ``[max_batch]``, int64. Row of each request, and slot of its newest token within it;
        the first `num_reqs` are written.
    """
    dims = _check_attended(rows, lengths, slots, attended)
    dims.check("set_rows", set_rows, "max_batch", INT64)
    dims.check("write_slots", write_slots, "max_batch", INT64)
    _check_sizes(num_resident, num_recent, num_dense)
    if uses_triton(slots.device):
        from tandemkv.kernels.triton_ops.step_tables import load_ring as on_gpu

        return on_gpu(
            rows, lengths, slots, attended, set_rows, write_slots, num_resident=num_resident,
            num_recent=num_recent, num_dense=num_dense,
        )  # fmt: skip
    size, rows, lengths = len(rows), rows.long()[:, None], lengths.long()[:, None]
    column = torch.arange(slots.shape[1], device=slots.device)
    count = _attended(lengths, num_resident + num_recent, num_dense)
    filled = (lengths - num_recent).clamp(0, num_resident)
    is_sparse = (lengths > num_dense) & (rows != 0)

    def slot_of(position: torch.Tensor) -> torch.Tensor:
        return latest_slots(position, ~is_sparse, num_resident=num_resident, num_recent=num_recent)

    in_set = is_sparse & (column < filled)
    slot = torch.where(in_set, column, slot_of(lengths - count + column))
    found = (rows * slots.shape[1] + slot).to(slots.dtype)
    slots[:size] = torch.where(column < count, found, slots[:size])
    attended[:size] = count[:, 0]
    set_rows[:size] = rows[:, 0]
    write_slots[:size] = slot_of(lengths - 1)[:, 0]


def load_candidates(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    page_slots: torch.Tensor,
    tables: CandidateTables,
    *,
    page_size: int,
    num_sink: int,
    num_excluded: int,
    num_resident: int,
    num_cold: torch.Tensor,
    num_layers: int,
) -> None:
    """Fill in what selections of a decode step read, and count them.

    Candidates are ``[num_sink, max(0, length - num_excluded))``, of which up to `num_resident`
    fill slots. Selections are made for requests of more than `num_cold` tokens, not for row 0,
    that of padding.

    Parameters
    ----------
    rows, lengths : torch.Tensor
        ``[num_reqs]``, int32 or int64. Row of each request, and its tokens.
    page_slots : torch.Tensor
        ``[num_rows, num_pages]``, int32 or int64. Slot of the first position of each page; a
        page is that slot divided by `page_size`, rounded down.
    tables : CandidateTables
        The first `num_reqs` entries are written; of the pages, as many as both have. `step`
        grows by 1, `selections` by `num_layers` for each active request.
    num_cold : torch.Tensor
        ``[]``, int32. A graph that captures this reads it anew in each step.
    page_size, num_sink, num_excluded, num_resident, num_layers : int
        See above.
    """
    dims = Dims()
    dims.check("tables.step", tables.step, "", INT32)
    dims.check("num_cold", num_cold, "", INT32)
    dims.check("rows", rows, "num_reqs", INTS)
    dims.check("lengths", lengths, "num_reqs", INTS)
    dims.check("page_slots", page_slots, "num_rows num_pages", INTS)
    _check_fits(len(rows), len(tables.rows))
    check_int("page_size", page_size, minimum=1)
    counts = {
        "num_sink": num_sink, "num_excluded": num_excluded, "num_resident": num_resident,
        "num_layers": num_layers,
    }  # fmt: skip
    check_counts(**counts)
    if uses_triton(rows.device):
        from tandemkv.kernels.triton_ops.step_tables import load_candidates as on_gpu

        return on_gpu(
            rows, lengths, page_slots, tables, page_size=page_size, num_sink=num_sink,
            num_excluded=num_excluded, num_resident=num_resident, num_cold=num_cold,
            num_layers=num_layers,
        )  # fmt: skip
    size, width = len(rows), min(tables.pages.shape[1], page_slots.shape[1])
    hi, active = tables.hi[:size], tables.active[:size]
    tables.rows[:size] = rows
    tables.lengths[:size] = lengths
    torch.sub(tables.lengths[:size], 1, out=tables.positions[:size])
    torch.sub(lengths, num_excluded, out=hi)
    hi.clamp_(min=0)
    tables.lo[:size].fill_(num_sink)
    torch.clamp(hi, max=num_resident, out=tables.num_target[:size])
    torch.gt(lengths, num_cold, out=active)
    active &= rows != 0
    torch.div(
        page_slots[rows.long(), :width],
        page_size,
        rounding_mode="floor",
        out=tables.pages[:size, :width],
    )
    tables.step.add_(1)
    tables.selections.add_(active.sum(), alpha=num_layers)


def _check_attended(
    rows: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor, attended: torch.Tensor
) -> Dims:
    dims = Dims()
    dims.check("rows", rows, "num_reqs", INTS)
    dims.check("lengths", lengths, "num_reqs", INTS)
    dims.check("slots", slots, "max_batch width", INT32)
    dims.check("attended", attended, "max_batch", INT64)
    _check_fits(len(rows), len(slots))
    return dims


def _check_fits(num_reqs: int, max_batch: int) -> None:
    if num_reqs > max_batch:
        fail("len(rows)", num_reqs, f"<= max_batch={max_batch}")


def _check_sizes(num_resident: int, num_recent: int, num_dense: int) -> None:
    check_counts(num_resident=num_resident, num_dense=num_dense)
    check_int("num_recent", num_recent, minimum=1)


def _attended(lengths: torch.Tensor, most: int, num_dense: int) -> torch.Tensor:
    return torch.where(lengths > num_dense, lengths.clamp(max=most), lengths)
