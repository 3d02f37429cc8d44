# SPDX-License-Identifier: Apache-2.0
"""Which slot holds which logical position of which request.

Owned by a session; rows are the inference rank's request rows, row 0 is padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandemkv.kernels.placing import place

from .protocol.errors import ProtocolError
from .protocol.messages import RowStep

PADDING_ROW = 0
_CPU = torch.device("cpu")


class RowTable:
    """Slots ``[max_rows + 1, max_context]`` int32 by logical position, and who occupies a row.

    Parameters
    ----------
    max_rows : int
        Largest row id.
    max_context : int
        Most tokens of a request.
    num_slots : int
        Slots of the store; larger ids are refused.
    device : torch.device
        Of the table, and of the slots that are handed in.
    """

    def __init__(
        self, *, max_rows: int, max_context: int, num_slots: int, device: torch.device = _CPU
    ) -> None:
        self.slots = torch.zeros(max_rows + 1, max_context, dtype=torch.int32, device=device)
        self._num_slots = num_slots
        self._generations: dict[int, int] = {}
        self._lengths: dict[int, int] = {}

    @property
    def num_live(self) -> int:
        """Occupied rows."""
        return len(self._generations)

    def check(self, step_row: RowStep) -> None:
        """Refuse a row or length that the table cannot hold.

        Raises
        ------
        ProtocolError
            If the row or one of its lengths is out of range.
        """
        rows, context = self.slots.shape
        if step_row.row >= rows:
            raise ProtocolError(f"row={step_row.row} must be below max_rows + 1 = {rows}")
        if not step_row.prefix_len <= step_row.length <= context:
            raise ProtocolError(
                f"row={step_row.row}: prefix_len={step_row.prefix_len} <= "
                f"length={step_row.length} <= max_context={context} does not hold"
            )

    def check_slots(self, slots: torch.Tensor) -> None:
        """Refuse slot ids outside the store.

        Raises
        ------
        ProtocolError
            If an id is negative or not below `num_slots`.
        """
        if slots.numel() == 0:
            return
        low, high = (int(x) for x in torch.aminmax(slots))
        if low < 0 or high >= self._num_slots:
            raise ProtocolError(
                f"slot ids {low}..{high} must be within 0..{self._num_slots - 1}; "
                "both ranks must agree on capacity_tokens"
            )

    def generation(self, row: int) -> int | None:
        """Return the generation that occupies `row`, or None."""
        return self._generations.get(row)

    def is_occupied_by(self, row: int, generation: int) -> bool:
        """Whether (`row`, `generation`) is the present occupancy."""
        return self._generations.get(row) == generation

    def assign(
        self, step_row: RowStep, slots: torch.Tensor, *, keep_length: bool = False
    ) -> int | None:
        """Set the slots ``[0, length)`` of a row.

        Parameters
        ----------
        step_row : RowStep
            Row, generation and length.
        slots : torch.Tensor
            ``[length]`` int32.
        keep_length : bool
            Positions beyond `length` that the same occupancy has stay known (dirty rows).

        Returns
        -------
        int or None
            The generation that this one displaced.
        """
        if step_row.row == PADDING_ROW:
            return None
        displaced = self._generations.get(step_row.row)
        known = self._lengths[step_row.row] if keep_length and displaced is not None else 0
        if displaced != step_row.generation:
            known = 0
        self.slots[step_row.row, : step_row.length] = slots
        self._generations[step_row.row] = step_row.generation
        self._lengths[step_row.row] = max(known, step_row.length)
        return displaced if displaced != step_row.generation else None

    def append(self, step_row: RowStep, slot: int) -> None:
        """As `append_all`, for one row."""
        self.append_all([step_row], place([slot], self.slots.device, torch.int32))

    def append_all(self, step_rows: Sequence[RowStep], slots: torch.Tensor) -> None:
        """Set the slot of position ``length - 1`` of occupied rows; padding rows have none.

        Parameters
        ----------
        step_rows : Sequence[RowStep]
            Rows, generations and lengths.
        slots : torch.Tensor
            ``[len(step_rows)]`` int32.

        Raises
        ------
        ProtocolError
            If a row is occupied by another generation, or earlier positions are unknown.
        """
        real = [i for i, row in enumerate(step_rows) if row.row != PADDING_ROW]
        for step_row in (step_rows[i] for i in real):
            self._check_append(step_row)
            self._lengths[step_row.row] = step_row.length
        if not real:
            return
        device = self.slots.device
        rows = place([step_rows[i].row for i in real], device)
        positions = place([step_rows[i].length - 1 for i in real], device)
        kept = slots if len(real) == len(step_rows) else slots[place(real, device)]
        self.slots[rows, positions] = kept

    def _check_append(self, step_row: RowStep) -> None:
        row, length = step_row.row, step_row.length
        if not self.is_occupied_by(row, step_row.generation):
            raise ProtocolError(
                f"row={row} generation={step_row.generation} is not known here "
                f"(occupied by {self._generations.get(row)}); it must be extended first"
            )
        if length < 1 or length - 1 > self._lengths[row]:
            raise ProtocolError(
                f"row={row}: decode at length={length}, but only {self._lengths[row]} "
                "positions are known"
            )

    def release(self, row: int, generation: int) -> bool:
        """Forget an occupancy; False if it is not the present one."""
        if not self.is_occupied_by(row, generation):
            return False
        del self._generations[row], self._lengths[row]
        return True
