# SPDX-License-Identifier: Apache-2.0
"""What differs between the books of two ends; `test_triton_ops` runs the Triton kernels."""

from __future__ import annotations

import pytest
import torch

from tandemkv.kernels.changed_rows import put_changed_rows, take_changed_rows

_ROWS, _HEADS, _SLOTS, _DIM = 3, 2, 6, 4


class Ends:
    """Resident sets at two ends of a link, and a buffer of `cap` rows per KV head."""

    def __init__(self, cap: int) -> None:
        self.positions = torch.zeros(_ROWS, _HEADS, _SLOTS, dtype=torch.int32)
        self.sent = self.positions.clone()
        self.far = torch.randn(2, _ROWS, _SLOTS, _HEADS, _DIM)
        self.near = self.far.clone()
        self.slots = torch.empty(2, _HEADS, cap, dtype=torch.int32)
        self.buffer = torch.empty(2, 2, _HEADS, cap, _DIM)

    def change(self, row: int, head: int, slot: int) -> None:
        self.positions[row, head, slot] += 1
        self.far[:, row, slot, head] += 1.0

    def carry(self, rows: list[int], *, active: tuple[bool, bool] = (True, True)) -> None:
        index = torch.tensor(rows)
        take_changed_rows(
            self.positions, self.sent, *self.far, index, torch.tensor(active), self.slots,
            *self.buffer,
        )  # fmt: skip
        put_changed_rows(self.slots, *self.buffer, index, *self.near)


def test_what_changes_is_carried_once() -> None:
    ends = Ends(cap=2)
    for head, slot in ((0, 5), (0, 1), (1, 3)):
        ends.change(2, head, slot)
    ends.carry([1, 2])
    assert ends.slots.tolist() == [[[-1, -1], [-1, -1]], [[1, 5], [3, -1]]]
    assert torch.equal(ends.near, ends.far)
    ends.near.zero_()
    ends.carry([1, 2])
    assert not ends.near.any()


def test_what_finds_no_room_comes_later() -> None:
    ends = Ends(cap=2)
    for slot in (0, 2, 3, 5):
        ends.change(1, 1, slot)
    ends.carry([1, 2])
    assert ends.slots[0, 1].tolist() == [0, 2]
    assert not torch.equal(ends.near, ends.far)
    ends.carry([1, 2])
    assert ends.slots[0, 1].tolist() == [3, 5]
    assert torch.equal(ends.near, ends.far)


def test_nothing_of_a_request_without_a_set_is_touched() -> None:
    """Its tokens lie in the first slots, at this end alone."""
    ends = Ends(cap=3)
    ends.change(0, 0, 0)
    ends.change(1, 0, 0)
    ends.carry([0, 1], active=(False, True))
    assert torch.equal(ends.near[:, 1], ends.far[:, 1])
    assert not torch.equal(ends.near[:, 0], ends.far[:, 0])
    ends.carry([0, 1])
    assert torch.equal(ends.near, ends.far)


@pytest.mark.parametrize("name", ["slots", "k", "active"])
def test_wrong_arguments_are_refused(name: str) -> None:
    ends, index = Ends(cap=2), torch.tensor([1, 2])
    given = {"slots": ends.slots, "k": ends.buffer[0], "active": torch.tensor([True, True])}
    given[name] = given[name][:1]
    with pytest.raises(ValueError, match=r"num_reqs|shape"):
        take_changed_rows(
            ends.positions, ends.sent, *ends.far, index, given["active"], given["slots"],
            given["k"], ends.buffer[1],
        )  # fmt: skip
