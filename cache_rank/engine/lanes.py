# SPDX-License-Identifier: Apache-2.0
"""What the lanes of selection have to do with one another and with another GPU."""

from __future__ import annotations

import torch

from tandemkv.cache_rank.protocol.engine import EnginePools
from tandemkv.kernels.exchange import SampleWeights


class LaneWeights:
    """Keeps the weights of samples on the cache rank's GPU until rows are copied to another's.

    The next scan of all keys waits for the mirror, which has the weights only at its end: stores
    over NVLink would hold it up there. So it writes them to memory of its lane, for one layer after
    the other, and the copy of rows, which nothing but the layer itself waits for, carries them. On
    one GPU the mirror writes them where they belong. `num_lanes`: those in which sets are compared
    and rows are copied, one layer after the other in each.
    """

    def __init__(self, pools: EnginePools, num_lanes: int) -> None:
        self._log_weight = pools.log_weight
        self._lanes: torch.Tensor | None = None
        if pools.is_far and pools.log_weight is not None:
            shape = (num_lanes, *pools.log_weight.shape[1:])
            device = pools.k[0].device
            self._lanes = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all lanes."""
        return 0 if self._lanes is None else self._lanes.nbytes

    def written(self, layer: int, lane: int) -> torch.Tensor | None:
        """Return what the mirror writes, ``[rows, H, num_samples]``; None without samples."""
        if self._log_weight is None:
            return None
        return self._log_weight[layer] if self._lanes is None else self._lanes[lane]

    def carried(self, layer: int, lane: int, active: torch.Tensor) -> SampleWeights | None:
        """Return what the copy of rows that follows in the lane carries; None on one GPU.

        Of requests that are not `active` ``[B]`` bool the mirror has written nothing: their rows
        in the lane are another layer's, or another request's.
        """
        if self._log_weight is None or self._lanes is None:
            return None
        return SampleWeights(
            source=self._lanes[lane], target=self._log_weight[layer], active=active
        )


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
