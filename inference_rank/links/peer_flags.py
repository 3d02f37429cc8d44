# SPDX-License-Identifier: Apache-2.0
"""Flags between the forward pass's GPU and the cache rank's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandemkv.cache_rank.protocol.errors import ContractError

from .peer_memory import seen_from


@dataclass(frozen=True, slots=True)
class Signal:
    """The same flags ``[n]`` int32, for kernels of the GPU that raises and of the one that waits.

    They lie in the memory of the one that waits.
    """

    raised: torch.Tensor
    waited: torch.Tensor


class PeerFlags:
    """Flags of a step, one set for all captured graphs: no two of them run at once.

    Whatever is raised in a step is waited for in it: between two steps all are down. One that was
    left up would let a later step read what is not there yet.

    Parameters
    ----------
    device, cache_device : torch.device
        Of the forward pass and of the cache rank.
    num_layers, max_batch : int
        Layers, and rows of a step at most.
    """

    def __init__(
        self, device: torch.device, cache_device: torch.device, num_layers: int, max_batch: int
    ) -> None:
        self._side = torch.zeros((num_layers, max_batch), dtype=torch.int32, device=cache_device)
        self._main = torch.zeros((num_layers, max_batch), dtype=torch.int32, device=device)
        self._side_from_main = seen_from(device, self._side)
        self._main_from_side = seen_from(cache_device, self._main)

    def to_side(self, layer: int, size: int) -> Signal:
        """Return flags of `size` rows that the forward pass writes for the selection of `layer`."""
        return Signal(self._side_from_main[layer, :size], self._side[layer, :size])

    def to_main(self, layer: int, size: int = 1) -> Signal:
        """Return flags of what the side has done for `layer`: a selection, or `size` answers."""
        return Signal(self._main_from_side[layer, :size], self._main[layer, :size])

    def take_down(self) -> None:
        """Take all down, after a step that failed; only where no step is under way."""
        self._side.zero_()
        self._main.zero_()

    def require_down(self) -> None:
        """Check that a step that has ended left none up; waits for the device.

        Raises
        ------
        ContractError
            If it did: somebody has raised flags that nobody waits for.
        """
        for name, flags in (("the forward pass", self._side), ("the cache rank", self._main)):
            layers = flags.any(1).nonzero()[:, 0].tolist()
            if layers:
                raise ContractError(
                    f"{name} has raised flags of rows {layers} that nobody waited for; report it"
                )
