# SPDX-License-Identifier: Apache-2.0
"""Where tokens lie in a resident set with a ring: none is overwritten while it is attended to."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemkv.kernels.slot_rules import latest_slots, ring_slots
from tandemkv.kernels.step_tables import load_ring

RESIDENT, RECENT, ROWS = st.integers(0, 9), st.integers(2, 7), 3


@given(num_resident=RESIDENT, num_recent=RECENT, length=st.integers(1, 60))
@settings(max_examples=200)
def test_the_latest_tokens_fill_the_ring(num_resident: int, num_recent: int, length: int) -> None:
    latest = torch.arange(max(0, length - num_recent), length)
    slots = ring_slots(latest, num_resident=num_resident, num_recent=num_recent)
    assert len(set(slots.tolist())) == len(latest)
    assert all(num_resident <= slot < num_resident + num_recent for slot in slots.tolist())


@given(num_resident=RESIDENT, num_recent=RECENT, data=st.data())
@settings(max_examples=200)
def test_a_request_that_fits_has_each_token_in_a_slot_of_its_own(
    num_resident: int, num_recent: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, num_resident + num_recent))
    tokens = torch.arange(length)
    slots = latest_slots(
        tokens, torch.ones(length, dtype=torch.bool), num_resident=num_resident,
        num_recent=num_recent,
    )  # fmt: skip
    assert len(set(slots.tolist())) == length
    first = min(length, num_resident)
    assert slots[:first].tolist() == list(range(first))


@given(
    num_resident=RESIDENT, num_recent=RECENT, prompt=st.integers(1, 30), steps=st.integers(1, 30)
)
@settings(max_examples=200)
def test_what_a_step_attends_to_was_written_there(
    num_resident: int, num_recent: int, prompt: int, steps: int
) -> None:
    """A set filled from a prompt, then a token a step: read back through the step's table."""
    most = num_resident + num_recent
    held = torch.full((ROWS * most,), -1)
    slots = torch.zeros((1, most), dtype=torch.int32)
    attended, rows = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    newest = torch.zeros(1, dtype=torch.int64)
    row = 2

    def write(positions: torch.Tensor, *, is_whole: bool) -> None:
        where = latest_slots(
            positions, torch.full_like(positions, is_whole, dtype=torch.bool),
            num_resident=num_resident, num_recent=num_recent,
        )  # fmt: skip
        held[row * most + where] = positions

    start = 0 if prompt <= most else prompt - num_recent
    write(torch.arange(start, prompt), is_whole=prompt <= most)
    for length in range(prompt + 1, prompt + steps + 1):
        load_ring(
            torch.tensor([row]), torch.tensor([length]), slots, attended, rows, newest,
            num_resident=num_resident, num_recent=num_recent, num_dense=most,
        )  # fmt: skip
        write(torch.tensor([length - 1]), is_whole=length <= most)
        assert held[row * most + int(newest)] == length - 1
        count = int(attended)
        found = held[slots[0, :count].long()].tolist()
        if length <= most:
            assert found == list(range(length))
        else:  # the others are the engine's
            assert count == most
            assert found[num_resident:] == list(range(length - num_recent, length))
