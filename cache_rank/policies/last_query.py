# SPDX-License-Identifier: Apache-2.0
"""Select with the last true query, for a later step."""

from __future__ import annotations

from typing import ClassVar

from tandemkv.cache_rank.protocol.messages import Timing

from .base import PolicyCapabilities, ScoringPolicy


class LastQueryPolicy(ScoringPolicy):
    """Score with q_t what step t + 1 uses: `async_spade` with all weight on q_t."""

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.NEXT_STEP, per_head=True
    )
