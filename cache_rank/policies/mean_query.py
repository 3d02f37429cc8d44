# SPDX-License-Identifier: Apache-2.0
"""Select with the mean of the latest queries, for a later step: an ablation of `async_spade`."""

from __future__ import annotations

from typing import ClassVar

import torch

from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.kernels.query_window import mean_predict

from .base import PolicyCapabilities
from .windowed import WindowedPolicy


class MeanQueryPolicy(WindowedPolicy):
    """Score with the mean of the latest ``window + 1`` queries."""

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.NEXT_STEP, wants_query_window=True, prediction="mean", per_head=True
    )

    def predict(self, windows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """See `WindowedPolicy.predict`."""
        return mean_predict(windows, counts)
