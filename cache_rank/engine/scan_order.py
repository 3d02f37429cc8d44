# SPDX-License-Identifier: Apache-2.0
"""The order of a scan of all keys and of the choice that another lane is still making."""

from __future__ import annotations

import torch


class ScanOrder:
    """Lets the scan of a selection wait for the choice of the selection before it.

    A scan fills every multiprocessor for 100 us. What a choice still has to launch, a program for
    each head, then waits for one to drain, and so does the layer that it is for: with 1 + 1 H200, 8
    x 64K, a mirror took 47 us instead of 23, and the second layer of a step waited 105 us. On the
    GPU of the forward pass scans give way to everything, and waiting gains nothing. `is_kept`:
    whether anyone waits, which pays where the cache rank has a GPU of its own. On a CPU one thing
    is done after the other anyway.
    """

    def __init__(self, device: torch.device, *, is_kept: bool) -> None:
        self._is_kept, self._device = is_kept, device
        self._chosen: torch.cuda.Event | None = None

    def end_step(self) -> None:
        """Forget this step's choices: an event of one capture, or of none, is void in another."""
        self._chosen = None

    def await_choice(self) -> None:
        """Let the current stream wait for the last choice of this step."""
        if self._chosen is not None:
            torch.cuda.current_stream(self._device).wait_event(self._chosen)

    def note_choice(self) -> None:
        """Mark that a selection has queued its choice on the current stream."""
        if self._is_kept and self._device.type == "cuda":
            self._chosen = torch.cuda.Event()
            self._chosen.record(torch.cuda.current_stream(self._device))
