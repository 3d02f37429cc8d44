# SPDX-License-Identifier: Apache-2.0
"""Totals that kernels add up on the device, read without making the device or anyone wait."""

from __future__ import annotations

import torch

from tandemkv.kernels.streams import shared_stream

_NAMES = ("resident_hits_total", "resident_misses_total", "fetched_rows_total", "selections_total")


class DeviceCounters:
    """Totals since the start. Written by one thread, read by any.

    Attributes
    ----------
    totals : torch.Tensor
        ``[4]`` int64: selected tokens that were resident, that were not, rows fetched (all per
        KV head), and selections, one for each request and layer.
    selections : torch.Tensor
        ``[]``, the last of them.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.totals = torch.zeros(len(_NAMES), dtype=torch.int64, device=device)
        self.selections = self.totals[_NAMES.index("selections_total")]
        self._copy = torch.zeros(len(_NAMES), dtype=torch.int64, pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None
        self._stream = shared_stream(device)
        self._last = dict.fromkeys(_NAMES, 0.0)

    def begin_step(self) -> None:
        """On a GPU keep what a copy under way has brought, and start the next; not to be captured.

        Behind what the current stream of the totals' device has, and not on it: no step waits for a
        copy to the host, which takes 15 us of a stream (H200); outside graphs a scan may.
        """
        if self._copied is None or self._stream is None:
            return
        if self._copied.query():
            self._last = _named(self._copy)
            self._stream.wait_stream(torch.cuda.current_stream(self.totals.device))
            with torch.cuda.stream(self._stream):
                self._copy.copy_(self.totals, non_blocking=True)
                self._copied.record(self._stream)

    def last(self) -> dict[str, float]:
        """Return totals, on a GPU as of about the start of a recent step; see `begin_step`."""
        return self.read() if self._copied is None else self._last

    def read(self) -> dict[str, float]:
        """Return the totals; waits for the device."""
        return _named(self.totals)


def _named(totals: torch.Tensor) -> dict[str, float]:
    return {name: float(value) for name, value in zip(_NAMES, totals.tolist(), strict=True)}
