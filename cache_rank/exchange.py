# SPDX-License-Identifier: Apache-2.0
"""The transfers of a step, seen from the cache rank: receives ahead, sends behind.

Used by the service thread. A buffer is made per transfer and lives until its transfer is
done, so nothing is overwritten while it is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from .counters import BusyClock, Counters
from .protocol.errors import ProtocolError
from .protocol.step_program import Direction, Transfer
from .protocol.transport import Transport, Work

_RECEIVES_AHEAD = 3
_MAX_PENDING_SENDS = 512
_MAX_PENDING_BYTES = 256 << 20
_CPU = torch.device("cpu")


class Exchange:
    """Moves announced transfers over one transport, of tensors on `device`."""

    def __init__(
        self,
        transport: Transport,
        clock: BusyClock,
        counters: Counters,
        device: torch.device = _CPU,
    ) -> None:
        self._transport = transport
        self._device = device
        self._clock = clock
        self._counters = counters
        self._totals_before = (counters.bytes_sent_total, counters.bytes_received_total)
        self._announced: deque[Transfer] = deque()
        self._posted: deque[tuple[Transfer, torch.Tensor, Work]] = deque()
        self._sends: deque[tuple[torch.Tensor, Work]] = deque()
        self._pending_bytes = 0

    def announce(self, transfers: Iterable[Transfer]) -> None:
        """Note the transfers of a step, and post the first receives."""
        self._announced.extend(t for t in transfers if t.direction is Direction.UP)
        self._post()

    def receive(self, transfer: Transfer) -> torch.Tensor:
        """Wait for `transfer`, which must be the next announced one to come up.

        Raises
        ------
        ProtocolError
            If it is not.
        TransferAbortedError, TransferTimeoutError
            The transport broke.
        """
        self._post()
        if not self._posted or self._posted[0][0] is not transfer:
            raise ProtocolError(f"{transfer.kind.value} is not the next transfer to come")
        _, buffer, work = self._posted.popleft()
        self._post()
        with self._clock.waiting():
            work.wait(None)
        return buffer

    def receive_slots(self, num_slots: int) -> torch.Tensor:
        """Receive slot ids ``[num_slots]`` int32 outside a step."""
        slots = torch.empty(num_slots, dtype=torch.int32, device=self._device)
        work = self._transport.issue_recv(slots)
        with self._clock.waiting():
            work.wait(None)
        return slots

    def send(self, transfer: Transfer, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor that nobody writes to afterwards.

        Raises
        ------
        ProtocolError
            If its shape or dtype is not what `transfer` says.
        TransferAbortedError, TransferTimeoutError
            The transport broke.
        """
        if tuple(tensor.shape) != transfer.shape or tensor.dtype != getattr(torch, transfer.dtype):
            raise ProtocolError(
                f"{transfer.kind.value}: {tensor.dtype}{tuple(tensor.shape)} instead of "
                f"{transfer.dtype}{transfer.shape}"
            )
        self._sends.append((tensor, self._transport.issue_send(tensor)))
        self._pending_bytes += tensor.nbytes
        self._reap()

    def update_byte_counters(self) -> None:
        """Bring the byte counters up to date."""
        sent, received = self._totals_before
        self._counters.bytes_sent_total = sent + self._transport.bytes_sent
        self._counters.bytes_received_total = received + self._transport.bytes_received

    def _post(self) -> None:
        while self._announced and len(self._posted) < _RECEIVES_AHEAD:
            transfer = self._announced.popleft()
            dtype = getattr(torch, transfer.dtype)
            buffer = torch.empty(transfer.shape, dtype=dtype, device=self._device)
            self._posted.append((transfer, buffer, self._transport.issue_recv(buffer)))

    def _reap(self) -> None:
        while self._sends:
            tensor, work = self._sends[0]
            is_full = len(self._sends) > _MAX_PENDING_SENDS or (
                self._pending_bytes > _MAX_PENDING_BYTES and len(self._sends) > 2
            )
            if not work.is_done():
                if not is_full:
                    return
                with self._clock.waiting():
                    work.wait(None)
            self._sends.popleft()
            self._pending_bytes -= tensor.nbytes
