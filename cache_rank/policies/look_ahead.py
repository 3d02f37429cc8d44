# SPDX-License-Identifier: Apache-2.0
"""Select with the query that the residual stream of an earlier layer predicts, in the same step."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.settings.declared import (
    DEFAULT_SAMPLES,
    DeclaredPolicy,
)

from .base import PolicyCapabilities, PolicyOptions, ScoringPolicy


class LookAheadOptions(PolicyOptions):
    """Where the predicted query comes from."""

    distance: int = Field(
        default=1,
        ge=0,
        le=8,
        description="Layers between the residual stream and the query that it predicts.",
    )
    predictor: str = Field(
        default="",
        description="File of projections that predict queries better than W_q does, made by "
        "`tandemkv calibrate MODEL --policy look_ahead` for the same distance.",
    )

    def declare(self, capabilities: PolicyCapabilities) -> DeclaredPolicy:
        """See `PolicyOptions.declare`: both ranks follow one program of layers."""
        return capabilities.declare(layers_ahead=self.distance, predictor=self.predictor)


class LookAheadPolicy(ScoringPolicy):
    """Select in the same step, with the query that an earlier layer's residual stream predicts.

    The query of layer l is ``rope(q_norm(W_q^l norm_l(h_m)))``, m = l - ``distance``. The engine
    predicts it with the model's own weights, or with those of the file ``predictor``
    (`tandemkv.cache_rank.protocol.models.fitted_queries`); here it is scored against every
    candidate. Our own default.
    Relatives: InfiniGen's partial-weight speculation and OasisKV's draft queries; this one
    takes the exact full-width W_q, selects tokens per KV head, and runs on another device.
    """

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.SAME_STEP_HIDDEN, default_samples=DEFAULT_SAMPLES, per_head=True
    )
    options_model: ClassVar[type[PolicyOptions]] = LookAheadOptions
    options: LookAheadOptions
