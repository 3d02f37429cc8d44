# SPDX-License-Identifier: Apache-2.0
"""Data plane on CPU: one private gloo pair, two ranks, loopback only.

Built around what gloo does to those who are careless:

- A wait that times out closes the pair for good, so only one thread per direction waits in
  gloo, and callers wait for that. `abort` uses the same fact to break every wait at once
  (the process group's own ``abort`` does nothing).
- A receive smaller than the message kills the process. The size of a transfer is its tag, so
  sides that disagree never match, and time out instead.
- A receive that idles past its timeout closes the pair: none is posted before it is issued.

It is not the default process group (the serving process has its own), and it meets over a
file: no TCP store listens anywhere.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from .errors import CacheRankLostError, TransferAbortedError
from .gloo_lane import GlooWork, Lane, PostedWork

_dist: Any = torch.distributed  # its stubs know nothing of gloo's own interface
_ABORT_TAG = 0  # the tag is the size in bytes, and empty transfers are never posted


def connect_gloo(
    store_path: Path, *, rank: int, timeout_s: float, connect_timeout_s: float = 30.0
) -> GlooTransport:
    """Meet the other rank at `store_path`. Both sides call it; it blocks until both have.

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
        If the other side does not come.
    """
    if rank not in (0, 1):
        raise ValueError(f"rank={rank} must be 0 or 1")
    options = _dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=connect_timeout_s)
    options._threads = 1
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    try:
        store = _dist.FileStore(str(store_path), 2)
        store.set_timeout(timedelta(seconds=connect_timeout_s))
        group = _dist.ProcessGroupGloo(store, rank, 2, options)
    except RuntimeError as error:
        store_path.unlink(missing_ok=True)
        raise CacheRankLostError(
            f"no data plane within {connect_timeout_s:g} s at {store_path}: {error}"
        ) from error
    return GlooTransport(group, store, store_path, peer=1 - rank, timeout_s=timeout_s)


class GlooTransport:
    """See `transport.Transport`. Made by `connect_gloo`; any thread may use it.

    Wait for every send before `close`, which drops what is under way.
    """

    def __init__(
        self,
        group: Any,
        store: Any,
        store_path: Path,
        *,
        peer: int,
        timeout_s: float,
    ) -> None:
        self._group: Any = group
        self._store: Any = store
        self._store_path = store_path
        self._peer = peer
        self._bytes_sent = 0
        self._sends = Lane("send", self._post_send, timeout_s, self._break)
        self._recvs = Lane("recv", self._post_recv, timeout_s, self._break)

    def issue_send(self, tensor: torch.Tensor) -> GlooWork:
        """See `transport.Transport.issue_send`."""
        work = self._sends.issue(tensor)
        self._bytes_sent += tensor.nbytes
        return work

    def issue_recv(self, out: torch.Tensor) -> GlooWork:
        """See `transport.Transport.issue_recv`."""
        return self._recvs.issue(out)

    def abort(self) -> None:
        """Fail every transfer under way and all later ones. Takes a few ms."""
        self._break(TransferAbortedError("the transport was aborted"))

    def close(self) -> None:
        """End the threads, close the pair, remove the rendezvous file. Idempotent."""
        closed = TransferAbortedError("the transport is closed")
        if self._sends.is_idle and self._recvs.is_idle:
            # Nothing to break: a plain close lets the last bytes reach the peer.
            self._fail(closed)
        else:
            self._break(closed)
        self._sends.close()
        self._recvs.close()
        self._group = self._store = None
        self._store_path.unlink(missing_ok=True)

    @property
    def bytes_sent(self) -> int:
        """Bytes issued for sending since the start."""
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received since the start."""
        return self._recvs.num_bytes

    def _post_send(self, tensors: list[torch.Tensor], tag: int) -> PostedWork:
        posted: PostedWork = self._group.send(tensors, self._peer, tag)
        return posted

    def _post_recv(self, tensors: list[torch.Tensor], tag: int) -> PostedWork:
        posted: PostedWork = self._group.recv(tensors, self._peer, tag)
        return posted

    def _fail(self, error: Exception) -> None:
        self._sends.fail(error)
        self._recvs.fail(error)

    def _break(self, error: Exception) -> None:
        self._fail(error)
        group = self._group
        if group is not None:
            with contextlib.suppress(RuntimeError):
                never = group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _ABORT_TAG)
                never.wait(timedelta(milliseconds=1))
