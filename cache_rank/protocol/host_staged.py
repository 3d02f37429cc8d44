# SPDX-License-Identifier: Apache-2.0
"""A data plane that moves host memory only, for a rank whose tensors are on a GPU.

Each transfer passes through a host tensor of its own, pinned beside a GPU. Only this rank copies:
its peer, on a CPU, uses the same data plane as it is.
"""

from __future__ import annotations

import threading

import torch

from .transport import Transport, Work


class HostStagedTransport:
    """See `transport.Transport`. Any thread may use it.

    A send is ordered behind the stream that is current when it is issued. What is received is in
    place when `wait` returns True: no stream has to wait for another.

    Parameters
    ----------
    transport : Transport
        Moves contiguous tensors in host memory.
    device : torch.device
        Tensors on a device of this type are staged; others are handed on as they are.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._copies = _Copies(device)

    def issue_send(self, tensor: torch.Tensor) -> Work:
        """See `transport.Transport.issue_send`. Waits until the GPU has computed the tensor.

        Raises
        ------
        ValueError
            If the tensor is not contiguous, or neither staged nor in host memory.
        """
        if not self._is_staged(tensor):
            return self._transport.issue_send(tensor)
        return self._transport.issue_send(self._copies.to_host(tensor))

    def issue_recv(self, out: torch.Tensor) -> Work:
        """See `transport.Transport.issue_recv`.

        Raises
        ------
        ValueError
            As `issue_send`.
        """
        if not self._is_staged(out):
            return self._transport.issue_recv(out)
        host = self._copies.host_like(out)
        return StagedReceive(self._transport.issue_recv(host), host, out, self._copies)

    def abort(self) -> None:
        """See `transport.Transport.abort`."""
        self._transport.abort()

    def close(self) -> None:
        """See `transport.Transport.close`."""
        self._transport.close()

    @property
    def bytes_sent(self) -> int:
        """Bytes issued for sending since the start."""
        return self._transport.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received since the start."""
        return self._transport.bytes_received

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != self._copies.device.type:
            return False
        # The copy would be contiguous whatever this is, and the peer's layout is not ours to guess.
        if not tensor.is_contiguous():
            raise ValueError(
                f"tensor {tensor.dtype}{tuple(tensor.shape)} on {tensor.device}: only contiguous "
                "tensors are staged"
            )
        return True


class StagedReceive:
    """A receive into host memory, and a copy from there to `out` made by who waits first."""

    def __init__(self, work: Work, host: torch.Tensor, out: torch.Tensor, copies: _Copies) -> None:
        self._work = work
        self._host: torch.Tensor | None = host
        self._out = out
        self._copies = copies
        self._ready = copies.mark()
        self._guard = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `transport.Work.wait`. The copy, which waits for no peer, is not in the timeout."""
        if not self._work.wait(timeout_s):
            return False
        with self._guard:
            if self._host is not None:
                self._copies.from_host(self._host, self._out, self._ready)
                self._host = None  # until here: the copy reads it
        return True

    def is_done(self) -> bool:
        """See `transport.Work.is_done`; `wait` then has no more than the copy to make."""
        return self._work.is_done()


class _Copies:
    """Copies between `device` and host memory that are complete when a call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        is_pinned = self._stream is not None
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self.host_like(tensor)
        host.copy_(tensor, non_blocking=True)
        if self._stream is not None:
            # The data plane reads host memory at once and knows nothing of streams.
            torch.cuda.current_stream(self.device).synchronize()
        return host

    def mark(self) -> torch.cuda.Event | None:
        """Return the point that the current stream has been given work up to."""
        if self._stream is None:
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def from_host(
        self, host: torch.Tensor, out: torch.Tensor, ready: torch.cuda.Event | None
    ) -> None:
        """Copy `host` to `out`, whose memory is free for it from `ready` on."""
        if self._stream is None or ready is None:
            out.copy_(host)
            return
        # A stream of its own: behind the current one the copy would wait for the layer under way,
        # and so would whoever waits for what came. Not before `ready`: the allocator may have
        # given `out` memory that work queued before it still reads.
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            out.copy_(host, non_blocking=True)
        self._stream.synchronize()
