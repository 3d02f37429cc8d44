# SPDX-License-Identifier: Apache-2.0
"""Attend to everything."""

from __future__ import annotations

from typing import ClassVar

from tandemkv.cache_rank.protocol.messages import Timing

from .base import Policy, PolicyCapabilities


class ExactPolicy(Policy):
    """Attends to all tokens in every layer, as dense attention does."""

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.NONE, all_exact=True, per_head=True
    )
