# SPDX-License-Identifier: Apache-2.0
"""The data plane between one inference rank and one cache rank, split into issue and wait.

Transfers of one direction complete in the order in which they were issued. Neither side may
issue a transfer whose size was not agreed on the control plane (`step_program`).
"""

from __future__ import annotations

from typing import Protocol

import torch


class Work(Protocol):
    """A transfer under way. What is received may be read once `wait` has returned True."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until done.

        Returns False when `timeout_s` passes first: the transfer stays valid and may be
        waited for again. None waits up to the transport's own timeout.

        Raises
        ------
        TransferTimeoutError
            The transport's own timeout passed; the pair is unusable.
        TransferAbortedError
            `Transport.abort` was called, or the peer is gone.
        """

    def is_done(self) -> bool:
        """Whether the transfer is complete, without waiting."""


class Transport(Protocol):
    """One pairwise channel."""

    def issue_send(self, tensor: torch.Tensor) -> Work:
        """Send a contiguous tensor. It must not be written to until the work is done."""

    def issue_recv(self, out: torch.Tensor) -> Work:
        """Receive into a contiguous tensor of exactly the announced size."""

    def abort(self) -> None:
        """Break every transfer under way, from any thread; never blocks for long."""

    def close(self) -> None:
        """Release threads, sockets and files. Idempotent."""

    @property
    def bytes_sent(self) -> int:
        """Bytes issued for sending since the start."""

    @property
    def bytes_received(self) -> int:
        """Bytes received since the start."""
