# SPDX-License-Identifier: Apache-2.0
"""Reference of `tandemkv.kernels.step_tables`."""

import torch

from tandemkv.kernels.slot_rules import latest_slots
from tandemkv.kernels.step_tables import CandidateTables


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
    """Fill; see `tandemkv.kernels.step_tables.load_attended`."""
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
    """Fill; see `tandemkv.kernels.step_tables.load_ring`."""
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
    """Fill; see `tandemkv.kernels.step_tables.load_candidates`."""
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


def _attended(lengths: torch.Tensor, most: int, num_dense: int) -> torch.Tensor:
    return torch.where(lengths > num_dense, lengths.clamp(max=most), lengths)
