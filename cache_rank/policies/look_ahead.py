# SPDX-License-Identifier: Apache-2.0
"""Select with the query that the residual stream of an earlier layer predicts, in the same step."""

from __future__ import annotations

from typing import ClassVar

from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.settings import DEFAULT_SAMPLES

from .base import PolicyCapabilities, ScoringPolicy


class LookAheadPolicy(ScoringPolicy):
    """Score with ``rope(q_norm(W_q^l norm_l(h_m)))``, m = l - `look_ahead_layers`.

    The engine predicts the query with the model's own weights; here it is scored against every
    candidate. Our own default.
    Relatives: InfiniGen's partial-weight speculation and OasisKV's draft queries; this one
    takes the exact full-width W_q, selects tokens per KV head, and runs on another device.
    """

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.SAME_STEP_HIDDEN, default_samples=DEFAULT_SAMPLES
    )
