# SPDX-License-Identifier: Apache-2.0
"""Data plane between two GPUs of one machine: a private NCCL pair for each direction.

Built around what NCCL does not do:

- It reports nothing when the peer dies: a receive stays pending for ever. So the host polls
  with a deadline of its own, detection is the heartbeat's, and `abort` breaks the
  communicators (half a second); a new epoch makes new ones in the same process. torch's
  watchdog and monitor, which would end the process instead, are switched off.
- Operations of one communicator run one after another. Each direction has its own, so that
  only the order per direction matters, as with every transport.
- Left to itself it listens on whatever interfaces it finds: it is told to use the loopback
  interface, and its diagnostic service (RAS), which listens too, is off. The ranks meet over a
  file: no TCP store listens anywhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from .errors import CacheRankLostError, TandemKVError, TransferAbortedError
from .nccl_lane import NcclLane, NcclWork, PostedOperation

logger = logging.getLogger(__name__)

NCCL_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""What NCCL and torch read when a communicator is made; values that are set already stay.

How buffers are shared (CUMEM) has to be the same on both sides: SGLang switches it off in its own
process unless it is set, and the two then fail with "invalid argument".
"""

_dist: Any = torch.distributed  # its stubs know nothing of the process groups' own interface
_NEVER = timedelta(days=365)  # deadlines are ours
_ABORT_JOIN_S = 5.0
_INFERENCE, _CACHE = 0, 1


def connect_nccl(
    store_path: Path, *, rank: int, timeout_s: float, connect_timeout_s: float = 60.0
) -> NcclTransport:
    """Meet the other rank at `store_path`. Both sides call it; it blocks until both have.

    The current CUDA device is used.

    Parameters
    ----------
    store_path : Path
        Rendezvous file of the epoch; must not hold anything from an earlier meeting.
    rank : int
        0 for the inference rank, 1 for the cache rank.
    timeout_s : float
        Longest time that one transfer may take.
    connect_timeout_s : float
        Longest wait for the other side.

    Raises
    ------
    CacheRankLostError
        If the other side does not come, or NCCL cannot connect the two GPUs.
    """
    if rank not in (_INFERENCE, _CACHE):
        raise ValueError(f"rank={rank} must be 0 or 1")
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", torch.cuda.current_device())
    made: list[NcclTransport] = []
    errors: list[Exception] = []
    groups: list[Any] = []

    def meet() -> None:
        torch.cuda.set_device(device)
        try:
            made.append(_meet(store_path, rank, device, timeout_s, connect_timeout_s, groups))
        except (RuntimeError, TandemKVError) as error:
            errors.append(error)

    # Making a communicator blocks inside NCCL and knows no deadline of ours.
    thread = threading.Thread(target=meet, name="nccl-connect", daemon=True)
    thread.start()
    thread.join(connect_timeout_s)
    if made:
        return made[0]
    _abort_bounded(groups)
    store_path.unlink(missing_ok=True)
    reason = errors[0] if errors else "no answer"
    raise CacheRankLostError(
        f"no data plane within {connect_timeout_s:g} s at {store_path}: {reason}"
    ) from (errors[0] if errors else None)


def _meet(
    store_path: Path,
    rank: int,
    device: torch.device,
    timeout_s: float,
    connect_timeout_s: float,
    groups: list[Any],
) -> NcclTransport:
    store = _dist.FileStore(str(store_path), 2)
    store.set_timeout(timedelta(seconds=connect_timeout_s))
    for name in ("up", "down"):
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        # Calls return while the communicator is being made or aborted.
        options.config.blocking = 0
        prefix = _dist.PrefixStore(name, store)
        groups.append(_dist.ProcessGroupNCCL(prefix, rank, 2, options))
    up, down = groups
    sending, receiving = (up, down) if rank == _INFERENCE else (down, up)
    transport = NcclTransport(
        sending, receiving, store, store_path, device=device, peer=1 - rank, timeout_s=timeout_s
    )
    # A communicator is made by its first transfer, on both sides at once.
    greeting = torch.zeros(1, dtype=torch.uint8, device=device)
    back = torch.empty_like(greeting)
    first, second = (
        (transport.issue_send, transport.issue_recv)
        if rank == _INFERENCE
        else (transport.issue_recv, transport.issue_send)
    )
    for issue, tensor in ((first, greeting), (second, back)):
        if not issue(tensor).wait(connect_timeout_s):
            raise CacheRankLostError("the first transfer did not come through")
    transport.forget_counts()
    return transport


class NcclTransport:
    """See `transport.Transport`. Made by `connect_nccl`; any thread may use it.

    Sends are ordered behind the stream that is current when they are issued, and what is
    received is in place when `wait` returns True: no stream has to wait for another.
    """

    def __init__(
        self,
        sending: Any,
        receiving: Any,
        store: Any,
        store_path: Path,
        *,
        device: torch.device,
        peer: int,
        timeout_s: float,
    ) -> None:
        self.device = device
        self._groups: tuple[Any, ...] = (sending, receiving)
        self._store: Any = store
        self._store_path = store_path
        self._bytes_sent = 0
        self._bytes_received_before = 0
        self._is_closed = False
        self._guard = threading.Lock()
        self._sends = NcclLane(
            _poster(sending.send, peer), device, timeout_s, self._break, posts_at_once=True
        )
        self._recvs = NcclLane(
            _poster(receiving.recv, peer), device, timeout_s, self._break, posts_at_once=False
        )

    def issue_send(self, tensor: torch.Tensor) -> NcclWork:
        """See `transport.Transport.issue_send`."""
        work = self._sends.issue(tensor)
        self._bytes_sent += tensor.nbytes
        return work

    def issue_recv(self, out: torch.Tensor) -> NcclWork:
        """See `transport.Transport.issue_recv`."""
        return self._recvs.issue(out)

    def abort(self) -> None:
        """Fail every transfer under way and all later ones. Takes about half a second."""
        self._break(TransferAbortedError("the transport was aborted"))

    def close(self) -> None:
        """Break the communicators, remove the rendezvous file. Idempotent.

        Wait for every send before: what is under way is dropped.
        """
        self._break(TransferAbortedError("the transport is closed"))
        self._store = None
        self._store_path.unlink(missing_ok=True)

    @property
    def bytes_sent(self) -> int:
        """Bytes issued for sending since the start."""
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received since the start."""
        return self._recvs.num_bytes - self._bytes_received_before

    def forget_counts(self) -> None:
        """Count from here on (the greeting does not count)."""
        self._bytes_sent = 0
        self._bytes_received_before = self._recvs.num_bytes

    def _break(self, error: Exception) -> None:
        self._sends.fail(error)
        self._recvs.fail(error)
        with self._guard:
            groups, self._groups = self._groups, ()
        _abort_bounded(groups)


def _poster(
    operation: Callable[[list[torch.Tensor], int, int], PostedOperation], peer: int
) -> Callable[[torch.Tensor], PostedOperation]:
    def post(tensor: torch.Tensor) -> PostedOperation:
        # Bytes: what NCCL cannot name (int8 views, booleans) travels too.
        return operation([tensor.view(-1).view(torch.uint8)], peer, 0)

    return post


def _abort_bounded(groups: Sequence[Any]) -> None:
    """Abort communicators, all at once; if that hangs (it may, with a dead peer), go on.

    One after another would not do: giving one's memory back waits for the GPU, and so for the
    kernel of another that spins until it is aborted too.
    """

    def run(group: Any) -> None:
        with contextlib.suppress(RuntimeError):
            group.abort()

    threads = [
        threading.Thread(target=run, args=(group,), name="nccl-abort", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _ABORT_JOIN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        logger.error("an NCCL communicator did not abort within %g s", _ABORT_JOIN_S)
