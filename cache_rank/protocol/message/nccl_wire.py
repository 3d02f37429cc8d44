# SPDX-License-Identifier: Apache-2.0
"""Messages between two GPUs, in one direction: a private NCCL communicator of `torch.distributed`.

Built around what NCCL and its process group do to those who are careless:

- The two ends meet by an identifier that the group leaves in its store. Here each end has a store
  of its own that nobody else sees, and the one entry that the other needs travels over the
  authenticated control connection (`door`). The place that it names listens on the interface that
  we name (`NCCL_SOCKET_IFNAME`) until both have met.
- A dead peer is never reported: what was queued waits for good. `abort` ends it. It frees memory,
  which waits for all of the GPU, the transfers of other communicators among it: these have to be
  aborted at the same time. Before that it waits until all CUDA graphs are dropped that have
  captured an operation, so whoever has some must never wait for `abort`.
- The group watches its operations, and ends the process if one takes long. Ours wait as long as a
  server is idle within a step, so it is told to leave that to us.
- Send and receive of one communicator queue behind each other. Each direction has its own.

It is not the default process group: the serving process has its own. What it moves is neither
encrypted nor signed, and NCCL chooses by itself how: NVLink, InfiniBand or TCP.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, ProtocolError, SettingsError

from .data_plane import INFERENCE_END

_LOG = logging.getLogger(__name__)
_dist: Any = torch.distributed
_FOREVER = timedelta(days=365)
_TICK_S = 0.005
_SEPARATOR, _ID_BYTES = b"=", 128
MOST_CTAS = 16
"""Programs of a transfer: each holds room of the GPU for as long as the transfer waits. Between two
H200s 2, 8, 16 and 32 move messages of 16 MiB at 35, 131, 246 and 286 GB/s (docs/benchmarks)."""
_LONGEST_POST_S = 1.0
"""An operation is queued in microseconds; one that takes longer is where only `abort` ends it."""
_LEFT_TO_US = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # It would write down the Python stack of each operation.
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
}
_UNUSED = {"NCCL_RAS_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"}
"""A port that listens for as long as the process lives, multicast memory, which is nothing for two,
and handles of a graph's buffers, which the other end would have to open while it is captured."""
_ON_ONE_HOST = {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
"""Events of a graph that keep its transfers in order with others of their communicator. They lie
beside its chain of kernels, and CUDA may queue them behind what the other direction waits in: NCCL
warns of deadlocks. A direction is one stream, which keeps that order, but for what a host does for
transfers over a network."""


class NcclWire:
    """One direction between two processes with a GPU each. One thread may use it.

    One end `sends`, the other receives; both have met within `timeout_s`. A transfer is at most
    `most_ctas` programs of the GPU.

    Attributes
    ----------
    sends : bool
        As given.
    place : bytes
        How the cache rank's end meets the inference rank's; empty there.

    Raises
    ------
    SettingsError
        If torch has no NCCL.
    CacheRankLostError
        If NCCL fails otherwise.
    """

    def __init__(
        self,
        end: int,
        device: torch.device,
        *,
        sends: bool,
        timeout_s: float,
        most_ctas: int = MOST_CTAS,
    ) -> None:
        if not _dist.is_nccl_available():
            raise SettingsError(
                "transport=message on GPUs needs a torch with NCCL; install one that is built for "
                "CUDA, or use --device cpu"
            )
        self._peer, self._device, self.sends = 1 - end, device, sends
        self._deadline = time.monotonic() + timeout_s
        self._store = _dist.HashStore()
        self._store.set_timeout(timedelta(seconds=timeout_s))
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        options.is_high_priority_stream = True  # else it starts behind the forward pass
        options.config.max_ctas = most_ctas
        self._reason, self._error, self._is_open = "", "", False
        self._posting = threading.Lock()
        self._breaker: threading.Thread | None = None
        self._group: Any = _dist.ProcessGroupNCCL(self._store, end, 2, options)
        self._thread = threading.Thread(target=self._run, name="nccl", daemon=True)
        self.place = b""
        if end == INFERENCE_END:
            self._thread.start()
            self.place = self._await_place()

    def meet(self, place: bytes = b"") -> None:
        """Return once both ends have met; `place` is that of the other one, if it has any.

        Raises `ProtocolError` if `place` is none, `CacheRankLostError` if it is not there in time.
        """
        if not self.place:
            key, _, identifier = place.partition(_SEPARATOR)
            if not key or len(identifier) != _ID_BYTES:
                raise ProtocolError(f"a place of {len(place)} bytes is none of NCCL's")
            self._store.set(key.decode("ascii", "replace"), identifier)
            self._thread.start()
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if not self._is_open:
            self.abort("the two GPUs do not meet")
            why = self._error or "the other one did not come in time"
            raise CacheRankLostError(f"the two GPUs do not meet for K/V: {why}")

    def send(self, body: torch.Tensor) -> None:
        """Queue ``body [n]`` uint8 to be sent, as work of the current stream.

        Raises `CacheRankLostError` if `abort` was called, or NCCL fails.
        """
        self._do(lambda group: group.send([body], self._peer, 0))

    def receive(self, out: torch.Tensor) -> None:
        """Queue ``out [n]`` uint8 to be received; as `send`."""
        self._do(lambda group: group.recv([out], self._peer, 0))

    def abort(self, reason: str) -> None:
        """Break what is under way, and all that is to come. Any thread may call it; idempotent.

        It does not wait until that is done: the other direction's has to be begun before.
        """
        is_first, self._reason = not self._reason, self._reason or reason
        if is_first:
            self._breaker = threading.Thread(target=self._break, name="nccl abort", daemon=True)
            self._breaker.start()

    def _break(self) -> None:
        # A communicator that is freed while an operation is being queued ends the process.
        has_lock = self._posting.acquire(timeout=_LONGEST_POST_S)
        try:
            self._group.abort()
        except RuntimeError as error:
            _LOG.warning("a communicator cannot be aborted: %s", error)
        finally:
            if has_lock:
                self._posting.release()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing be freed inside, where transfers are queued, or a graph that has some.

        Raises as `send`.
        """
        if self._reason:
            raise CacheRankLostError(self._reason)
        # Who aborts holds it until the graphs of this thread, among others, are dropped.
        while not self._posting.acquire(timeout=_TICK_S):
            if self._reason:
                raise CacheRankLostError(self._reason)
        try:
            if self._reason:
                raise CacheRankLostError(self._reason)
            yield
        except RuntimeError as error:
            raise CacheRankLostError(self._reason or f"NCCL: {error}") from error
        finally:
            self._posting.release()

    def _do(self, post: Any) -> None:
        with self.held():
            post(self._group).wait()  # the stream does, and not the host

    def _run(self) -> None:
        """Send, or receive, a first byte, by which the group makes its communicator."""
        try:
            with _on(self._device):
                first = torch.zeros(1, dtype=torch.uint8, device=self._device)
                self._do(lambda group: (group.send if self.sends else group.recv)(
                    [first], self._peer, 0
                ))  # fmt: skip
                if first.is_cuda:
                    torch.cuda.current_stream().synchronize()
            self._is_open = True
        except (CacheRankLostError, RuntimeError) as error:
            self._error = str(error)

    def _await_place(self) -> bytes:
        while time.monotonic() < self._deadline:
            for key in self._store.list_keys():
                identifier = bytes(self._store.get(key))
                if len(identifier) == _ID_BYTES:
                    return bytes(key.encode() + _SEPARATOR + identifier)
            if not self._thread.is_alive():
                break
            time.sleep(_TICK_S)
        self.abort("the two GPUs do not meet")
        raise CacheRankLostError(f"NCCL names no place to meet: {self._error or 'it is silent'}")


def prepare_nccl(interface: str) -> None:
    """Let NCCL meet on `interface` alone, an IP address of this machine, and leave waits to us.

    For all of this process, before its first communicator. An interface that the user has set
    stays; what torch would do about slow operations is turned off in any case. Raises
    `SettingsError` if the machine has no such interface.
    """
    name = interface_name(interface)
    os.environ.update(_LEFT_TO_US)
    is_here = ipaddress.ip_address(interface).is_loopback
    for variable, value in (_UNUSED | (_ON_ONE_HOST if is_here else {})).items():
        os.environ.setdefault(variable, value)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    if ":" in interface:
        os.environ.setdefault("NCCL_SOCKET_FAMILY", "AF_INET6")


def interface_name(address: str) -> str:
    """Return the name of the interface that has `address`, or whose network it is in.

    Raises `SettingsError` if there is none.
    """
    wanted, near = ipaddress.ip_address(address), ""
    for name, found in psutil.net_if_addrs().items():
        for each in found:
            if each.family not in (socket.AF_INET, socket.AF_INET6):  # a hardware address
                continue
            here = ipaddress.ip_address(each.address.partition("%")[0])
            if here == wanted:
                return name
            # Any address of the loopback network is this machine's; that of IPv6 has one alone.
            if here.is_loopback and here.version == 4:
                whole = ipaddress.ip_interface(f"{here}/{each.netmask}").network
                near = name if wanted in whole else near
    if not near:
        raise SettingsError(
            f"interface {address} is none of this machine; name an address that it has"
        )
    return near


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":  # in tests
        yield
        return
    with torch.cuda.device(device):
        yield
