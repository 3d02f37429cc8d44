# SPDX-License-Identifier: Apache-2.0
"""Base of the policies that predict the query of a later step from the latest ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.kernels.rope import apply_rope, unapply_rope

from .base import (
    Owner,
    PolicyCapabilities,
    PolicyContext,
    PolicyError,
    ScoringPolicy,
    SelectionInput,
)
from .query_windows import QueryWindows


class WindowedPolicy(ScoringPolicy):
    """Keeps the latest W + 1 queries of each request and layer, in float32.

    With ``ridge_unrotate`` (default) the window holds queries without RoPE, and the
    prediction is rotated to the position that will use it.
    """

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.NEXT_STEP, wants_query_window=True
    )

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._rotary = context.rotary if context.selection.ridge_unrotate else None
        if context.selection.ridge_unrotate and context.rotary is None:
            raise PolicyError(
                f"{type(self).__name__} with ridge_unrotate needs the model's rotary embedding"
            )
        self.windows = QueryWindows(context.selection.ridge_window + 1)

    @abstractmethod
    def predict(self, windows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Predict ``[S, Hq, D]`` from ``[S, Hq, W + 1, D]`` and counts ``[S, Hq]``."""

    def observe_prompt(
        self, layer: int, owner: Owner, queries: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """See `Policy.observe_prompt`."""
        self.windows.push(layer, owner, self._unrotate(queries, positions))

    def observe(
        self, layer: int, owners: Sequence[Owner], queries: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """See `Policy.observe`."""
        plain = self._unrotate(queries, positions)
        for owner, query in zip(owners, plain.split(1), strict=True):
            self.windows.push(layer, owner, query)

    def query_for(self, request: SelectionInput) -> torch.Tensor:
        """See `ScoringPolicy.query_for`."""
        windows, counts = self.windows.stack(request.layer, request.owners)
        windows = windows.transpose(1, 2)  # [S, Hq, W + 1, D]
        predicted = self.predict(windows, counts[:, None].expand(windows.shape[:2]))
        if self._rotary is None:
            return predicted
        return apply_rope(
            predicted.contiguous(),
            request.use_positions,
            self._rotary.inv_freq,
            scaling=self._rotary.scaling,
        )

    def release(self, owner: Owner) -> None:
        """See `Policy.release`."""
        self.windows.release(owner)

    def _unrotate(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        queries = queries.float().contiguous()
        if self._rotary is None:
            return queries
        return unapply_rope(queries, positions, self._rotary.inv_freq, scaling=self._rotary.scaling)
