# SPDX-License-Identifier: Apache-2.0
"""Selections from the residual stream, queued while the forward pass goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tandemkv.cache_rank.protocol.engine import Engine
from tandemkv.inference_rank.sglang.residual_hooks import install_residual_hooks

from .side_stream import SideStream


def put_stream(
    out: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """Write the residual stream, ``hidden_states + residual``, to the first rows of `out`.

    The decoder layer adds and normalises its inputs in place, so what is read beside it must be a
    copy.
    """
    out = out[: len(hidden_states)]
    if residual is None:
        out.copy_(hidden_states)
    else:
        torch.add(hidden_states, residual, out=out)


class LookAhead:
    """Lets the cache rank select for a layer where the forward pass enters an earlier one.

    The forward pass writes ``streams [num_layers, max_batch, hidden]``. `is_selecting` returns
    whether the current step selects; ``fetch(*layers, size=...)`` brings to layers what was chosen,
    inside a fork. While `is_pending` late layers are being selected for, so that the step is to be
    joined after its logits. Raises `ContractError` if the model's layers cannot be hooked.
    """

    def __init__(
        self,
        model: Any,
        rank: Engine,
        side: SideStream,
        streams: torch.Tensor,
        *,
        is_selecting: Callable[[], bool],
        fetch: Callable[..., None],
    ) -> None:
        self._rank, self._side, self._streams = rank, side, streams
        self._is_selecting, self._fetch = is_selecting, fetch
        self._program, self.is_pending = rank.program, False
        install_residual_hooks(model, self._on_layer_input)

    def begin_step(self) -> None:
        """Forget what a step, or a capture, that failed has left."""
        self.is_pending = False

    def _on_layer_input(
        self, layer: int, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        if not self._is_selecting():
            return
        size, rank, side = len(hidden_states), self._rank, self._side
        targets = self._program.targets_of(layer)
        if not targets and layer not in self._program.late_layers:
            return
        put_stream(self._streams[layer], hidden_states, residual)
        stream = self._streams[layer, :size]
        lanes = [rank.lane_of(target) for target in targets]
        # At the first layer two selections may begin; nobody can wait for the second before the
        # first is done, and beside each other they take 274 us instead of 185 (H200, 8 x 64K).
        for target, lane, after in zip(targets, lanes, (None, *lanes), strict=False):
            with side.fork(lane=lane, after=after):
                rank.choose_ahead(target, stream)
                self._fetch(target, *self._program.followers_of(target), size=size)
        if targets and layer == self._program.last_entry:
            self._select_late(size, behind=lanes[-1])

    def _select_late(self, size: int, *, behind: int) -> None:
        """Select for late layers and the next step, behind the step's last selection.

        That one began when the forward pass had come to its layer: late layers have attended.
        """
        rank = self._rank
        for layer in self._program.late_layers:
            lane = rank.lane_of(layer)
            with self._side.fork(lane=lane, behind=behind):
                rank.choose_late(layer, self._streams[layer, :size])
                rank.fetch(layer, size)
            behind, self.is_pending = lane, True
