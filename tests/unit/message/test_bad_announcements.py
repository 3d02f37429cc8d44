# SPDX-License-Identifier: Apache-2.0
"""Announcements from another host that would have the pump plan for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from two_hosts import DECODE, EXTEND, NUM_ROWS, ROWS, End

from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.step_ring import StepEntry, StepRow
from tandemkv.cache_rank.pump.contents import Contents
from tandemkv.cache_rank.pump.far import Announced, FarReceiver
from tandemkv.cache_rank.pump.lanes import HostReceiveLane
from tandemkv.cache_rank.pump.records import Op, Record


def _announced(entry: StepEntry) -> list[StepEntry]:
    """Return what the cache rank's pump is about to do once it has `entry`."""
    side, plane, due = End("last_query", has_all=False).side, Any, list[StepEntry]()
    received = Contents(side)
    lane = HostReceiveLane(side, received)
    receiver = FarReceiver(side, received.plan, plane, lane, Announced())  # type: ignore[arg-type]
    receiver._begin = due.append  # type: ignore[method-assign]
    content = torch.tensor(entry.words()).view(torch.uint8)
    receiver._apply(Record(Op.ENTRY, 0, 0, content))
    return due


@pytest.mark.parametrize("entry", [DECODE, EXTEND, replace(DECODE, rows=ROWS[:1] * NUM_ROWS)])
def test_requests_that_have_a_place(entry: StepEntry) -> None:
    assert [found.rows[:] for found in _announced(entry)] == [entry.rows]


@pytest.mark.parametrize(
    "rows",
    [
        [StepRow(row=NUM_ROWS, generation=1, length=9)],
        [StepRow(row=1, generation=1, length=65)],
        [StepRow(row=1, generation=1, length=1 << 40)],
        [StepRow(row=1, generation=1, length=9, prefix_len=6, window=4)],
        [StepRow(row=1, generation=1, length=9, window=1 << 40)],
        [StepRow(row=1, generation=1, length=1)] * (NUM_ROWS + 1),
        [StepRow(row=1, generation=1, length=64)] * NUM_ROWS,
    ],
    ids=["row", "length", "endless", "window", "endless window", "too many", "more than slots"],
)
def test_requests_that_have_none_are_refused(rows: list[StepRow]) -> None:
    with pytest.raises(ProtocolError, match="step 7 have no place here"):
        _announced(replace(EXTEND, rows=tuple(rows)))
