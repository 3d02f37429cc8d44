# SPDX-License-Identifier: Apache-2.0
"""The transfers of one step, seen from the inference rank.

The model calls in layer by layer; this object checks that each call is the transfer that
`step_program` lists next, and keeps receives posted in the agreed order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.step_program import Direction, Transfer, TransferKind
from tandemkv.cache_rank.protocol.transport import Transport, Work

_ISSUE_AHEAD = 2
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Receive:
    """A posted receive: wait for `work`, then read `buffer`."""

    transfer: Transfer
    buffer: torch.Tensor
    work: Work


class StepTransfers:
    """Send and receive in the order of a step's program, tensors on `device`.

    Used from the scheduler thread only.
    """

    def __init__(
        self, transport: Transport, transfers: Sequence[Transfer], device: torch.device = _CPU
    ) -> None:
        self._transport = transport
        self._device = device
        self._up = deque(t for t in transfers if t.direction is Direction.UP)
        self._down = deque(t for t in transfers if t.direction is Direction.DOWN)
        self._down_keys = {(t.kind, t.layers) for t in self._down}
        self._posted: dict[tuple[TransferKind, tuple[int, ...]], Receive] = {}

    def expects(self, kind: TransferKind, layers: tuple[int, ...]) -> bool:
        """Whether a receive of `kind` for `layers` belongs to this step."""
        return (kind, layers) in self._down_keys

    def wants(self, kind: TransferKind, layers: tuple[int, ...]) -> bool:
        """Whether a send of `kind` for `layers` is the next one."""
        return bool(self._up) and self._up[0].kind is kind and self._up[0].layers == layers

    def send(self, kind: TransferKind, layers: tuple[int, ...], tensor: torch.Tensor) -> None:
        """Send `tensor`, which must not be written to afterwards.

        Raises
        ------
        ProtocolError
            If this is not the next transfer of the step, or its shape or dtype differs.
        """
        want = self._up.popleft() if self._up else None
        if want is None or (want.kind, want.layers) != (kind, layers):
            raise ProtocolError(f"send of {kind.value} layers={layers}, expected {want}")
        if tuple(tensor.shape) != want.shape or tensor.dtype != getattr(torch, want.dtype):
            raise ProtocolError(
                f"{kind.value} layers={layers}: {tensor.dtype}{tuple(tensor.shape)}, "
                f"expected {want.dtype}{want.shape}"
            )
        self._transport.issue_send(tensor.contiguous())

    def receive(self, kind: TransferKind, layers: tuple[int, ...]) -> Receive:
        """Return the posted receive of `kind` for `layers`, without waiting.

        Raises
        ------
        ProtocolError
            If the step has no such receive.
        """
        key = (kind, layers)
        while key not in self._posted:
            if not self._down:
                raise ProtocolError(f"no receive of {kind.value} layers={layers} in this step")
            self._post_next()
        found = self._posted.pop(key)
        while self._down and len(self._posted) < _ISSUE_AHEAD:
            self._post_next()
        return found

    def check_complete(self) -> None:
        """Raise `ProtocolError` if a transfer of the step was not made."""
        left = [*self._up, *self._down, *(r.transfer for r in self._posted.values())]
        if left:
            raise ProtocolError(f"step ended with {len(left)} transfers not made, first {left[0]}")

    def _post_next(self) -> None:
        transfer = self._down.popleft()
        dtype = getattr(torch, transfer.dtype)
        buffer = torch.empty(transfer.shape, dtype=dtype, device=self._device)
        work = self._transport.issue_recv(buffer)
        self._posted[(transfer.kind, transfer.layers)] = Receive(transfer, buffer, work)
