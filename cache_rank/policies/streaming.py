# SPDX-License-Identifier: Apache-2.0
"""Attend to the first and the latest tokens only."""

from __future__ import annotations

from typing import ClassVar

from tandemkv.cache_rank.protocol.messages import Timing

from .base import Policy, PolicyCapabilities


class StreamingPolicy(Policy):
    """Sink and recent tokens; the rest is never looked at (except in `exact_layers`).

    References
    ----------
    Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, arXiv:2309.17453.
    Deviation: tokens keep their own positions, they are not renumbered within the window.
    """

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.NONE, per_head=True
    )
