# SPDX-License-Identifier: Apache-2.0
"""Attend to everything, on the cache rank."""

from __future__ import annotations

from typing import ClassVar

from tandemkv.cache_rank.protocol.messages import Timing

from .base import PolicyCapabilities, UnselectivePolicy


class ExactPolicy(UnselectivePolicy):
    """Every layer of a row takes the exact step: dense output at the cache rank's capacity."""

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.NONE, all_exact=True, per_head=True
    )
