# SPDX-License-Identifier: Apache-2.0
"""Base of the policies that predict the query of a later step from the latest ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch.nn.functional import pad

from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.kernels.to_device import to_device

from .base import (
    Owner,
    PolicyCapabilities,
    PolicyContext,
    PolicyError,
    PolicyOptions,
    Rotary,
    ScoringPolicy,
    SelectionInput,
)


class WindowOptions(PolicyOptions):
    """The window of queries that a prediction is made from."""

    window: int = Field(
        default=16, ge=1, le=64, description="W: queries besides the latest one that are kept."
    )
    unrotate: bool = Field(
        default=True, description="Predict from queries without RoPE, and rotate the prediction."
    )

    def reads_rotary(self, capabilities: PolicyCapabilities) -> bool:
        """See `PolicyOptions.reads_rotary`."""
        return self.unrotate


@dataclass(slots=True)
class QueryWindows:
    """Windows of the latest `size` queries ``[Hq, D]`` per request and layer."""

    size: int
    _windows: dict[Owner, dict[int, torch.Tensor]] = field(default_factory=dict)
    """``[n, Hq, D]``, `size` queries at most, newest last."""

    def push(self, layer: int, owner: Owner, queries: torch.Tensor) -> None:
        """Append queries ``[n, Hq, D]``, oldest first."""
        layers = self._windows.setdefault(owner, {})
        before = layers.get(layer, queries[:0])
        layers[layer] = torch.cat([before, queries])[-self.size :]

    def stack(self, layer: int, owners: Sequence[Owner]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the windows ``[S, size, Hq, D]``, newest last, and their counts ``[S]`` int64.

        Raises `KeyError` if nothing was pushed for one of `owners`.
        """
        found = [self._windows[owner][layer] for owner in owners]
        counts = to_device([len(window) for window in found], found[0].device)
        filled = [pad(window, (0, 0, 0, 0, self.size - len(window), 0)) for window in found]
        return torch.stack(filled), counts

    def release(self, owner: Owner) -> None:
        """Forget a request."""
        self._windows.pop(owner, None)

    def __len__(self) -> int:
        return len(self._windows)


class WindowedPolicy(ScoringPolicy):
    """Keeps the latest W + 1 queries of each request and layer, in float32.

    With ``unrotate`` (default) the window holds queries without RoPE, and the
    prediction is rotated to the position that will use it. Where RoPE does not turn the halves of
    a head, the window has its elements in another order (`Rotary.order`).
    """

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.NEXT_STEP, wants_query_window=True
    )
    options_model: ClassVar[type[PolicyOptions]] = WindowOptions
    options: WindowOptions

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._rotary: Rotary | None = None
        if self.options.unrotate:
            if context.rotary is None:
                raise PolicyError(
                    f"{type(self).__name__} with unrotate needs the model's rotary embedding"
                )
            inv_freq = context.rotary.inv_freq.to(context.device)
            self._rotary = replace(context.rotary, inv_freq=inv_freq)
        self.windows = QueryWindows(self.options.window + 1)

    @property
    def ridge(self) -> dict[str, Any]:
        """What `tandemkv.kernels.query_window` is told of a ridge regression, where it is one."""
        return {}

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
        rotary = self._rotary
        angles = torch.outer(request.use_positions.float(), rotary.inv_freq)
        return rotary.from_halves(_turned(predicted, angles, rotary.scaling))

    def release(self, owner: Owner) -> None:
        """See `Policy.release`."""
        self.windows.release(owner)

    def _unrotate(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        queries, rotary = queries.float(), self._rotary
        if rotary is None:
            return queries
        angles = -torch.outer(positions.float(), rotary.inv_freq)
        return _turned(rotary.to_halves(queries), angles, 1.0 / rotary.scaling)


def _turned(x: torch.Tensor, angles: torch.Tensor, factor: float) -> torch.Tensor:
    """Rotate the halves of heads ``[n, heads, D]`` float32 by ``angles [n, D / 2]``."""
    cos = (angles.cos() * factor).unsqueeze(1)
    sin = (angles.sin() * factor).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
