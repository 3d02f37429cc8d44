# SPDX-License-Identifier: Apache-2.0
"""Select with the step's true query. For evaluation: nothing of it is hidden."""

from __future__ import annotations

from typing import ClassVar

from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.settings.declared import DEFAULT_SAMPLES

from .base import PolicyCapabilities, ScoringPolicy


class OraclePolicy(ScoringPolicy):
    """Score with the query of the very attention that uses the selection: the bound of its kind."""

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.SAME_STEP_QUERY, default_samples=DEFAULT_SAMPLES, per_head=True
    )
