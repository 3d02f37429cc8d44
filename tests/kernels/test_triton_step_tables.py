# SPDX-License-Identifier: Apache-2.0
"""Tables of a decode step; `test_triton_ops` runs the cases of the Triton kernels."""

import dataclasses

import pytest
import torch

from tandemkv.kernels.step_tables import (
    CandidateTables,
    load_attended,
    load_candidates,
    load_ring,
)

SIZES = {"num_resident": 3, "num_recent": 2, "num_dense": 5}
COLD = torch.tensor(5, dtype=torch.int32)


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def _candidate_tables() -> CandidateTables:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    return CandidateTables(
        rows=zeros(3, dtype=torch.int64),
        positions=zeros(3, dtype=torch.int64),
        lengths=zeros(3),
        lo=zeros(3),
        hi=zeros(3),
        num_target=zeros(3),
        active=zeros(3, dtype=torch.bool),
        pages=zeros(3, 4),
        step=zeros(),
        selections=zeros(dtype=torch.int64),
    )


def test_attended_slots_by_hand() -> None:
    table = (10 * torch.arange(3)[:, None] + torch.arange(10)).to(torch.int32)
    slots, attended = torch.zeros(4, 5, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    load_attended(_ints(2, 1, 0), _ints(8, 5, 1), table, slots, attended, first_slot=100, **SIZES)
    assert attended.tolist() == [5, 5, 1, 0]
    assert slots[0].tolist() == [106, 107, 108, 26, 27]
    assert slots[1].tolist() == [10, 11, 12, 13, 14]
    assert slots[2, 0] == 0


def test_slots_of_a_ring_by_hand() -> None:
    slots, attended = torch.zeros(4, 5, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    rows, newest = torch.zeros(2, 4, dtype=torch.int64)
    load_ring(_ints(2, 1, 0), _ints(8, 5, 1), slots, attended, rows, newest, **SIZES)
    assert attended.tolist() == [5, 5, 1, 0]
    # Positions 6 and 7 of a ring of 2 that begins with position 3.
    assert slots[0].tolist() == [10, 11, 12, 14, 13]
    assert slots[1].tolist() == [5, 6, 7, 8, 9]
    assert rows.tolist() == [2, 1, 0, 0]
    assert newest.tolist() == [3, 4, 0, 0]


def test_candidates_by_hand() -> None:
    tables = _candidate_tables()
    page_slots = _ints(0, 0, 0, 8, 4, 12, 20, 16, 31).view(3, 3).to(torch.int32)
    load_candidates(
        _ints(2, 1, 0), _ints(9, 5, 9), page_slots, tables, page_size=4,
        num_sink=1, num_excluded=6, num_resident=2, num_cold=COLD, num_layers=7,
    )  # fmt: skip
    assert tables.positions.tolist() == [8, 4, 8]
    assert tables.lo.tolist() == [1, 1, 1]
    assert tables.hi.tolist() == [3, 0, 3]
    assert tables.num_target.tolist() == [2, 0, 2]
    assert tables.active.tolist() == [True, False, False]
    assert tables.pages.tolist() == [[5, 4, 7, 0], [2, 1, 3, 0], [0, 0, 0, 0]]
    assert (tables.step.item(), tables.selections.item()) == (1, 7)


def test_bad_arguments() -> None:
    table, slots = torch.zeros(3, 9, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)
    counts = torch.zeros(3, 2, dtype=torch.int64)
    two, three = _ints(1, 2), _ints(4, 4, 1)
    with pytest.raises(ValueError, match="max_batch=2"):
        load_attended(three, three, table, slots, counts[0], first_slot=0, **SIZES)
    with pytest.raises(ValueError, match="lengths"):
        load_attended(two, _ints(4), table, slots, counts[0], first_slot=0, **SIZES)
    with pytest.raises(ValueError, match="slots"):
        load_ring(two, two, slots.long(), *counts, **SIZES)
    with pytest.raises(ValueError, match="num_recent=0"):
        load_ring(two, two, slots, *counts, **{**SIZES, "num_recent": 0})
    tables = _candidate_tables()
    with pytest.raises(ValueError, match="page_size=0"):
        load_candidates(
            two, two, table, tables, page_size=0, num_sink=1, num_excluded=1,
            num_resident=2, num_cold=COLD, num_layers=1,
        )  # fmt: skip
    with pytest.raises(ValueError, match="num_cold"):
        load_candidates(
            two, two, table, tables, page_size=4, num_sink=1, num_excluded=1,
            num_resident=2, num_cold=COLD.long(), num_layers=1,
        )  # fmt: skip
    with pytest.raises(ValueError, match="active"):
        dataclasses.replace(tables, active=tables.lo)
    with pytest.raises(ValueError, match="contiguous"):
        dataclasses.replace(tables, lo=torch.zeros(6, dtype=torch.int32)[::2])
