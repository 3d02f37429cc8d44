# SPDX-License-Identifier: Apache-2.0
"""Kascade: select in a few anchor layers, reuse the positions in the layers after them."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from tandemkv.cache_rank.protocol.messages import Timing

from .base import (
    PolicyCapabilities,
    PolicyContext,
    PolicyError,
    PolicyOptions,
    ScoringPolicy,
)

_MIN_SELECTED = 128


class KascadeOptions(PolicyOptions):
    """How many tokens an anchor selects."""

    fraction: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Select max(fraction * context, 128), at most K; 0: always K.",
    )


class KascadePolicy(ScoringPolicy):
    """Score with the true query in anchor layers; the layers after them take the same positions.

    An anchor hands over its query in the same step, softmaxes each query head on its own and pools
    the distributions over the group (post-softmax pooling, section 3.4). A reuse layer hands over
    nothing and is not scanned: each of its heads takes the positions of one head of its anchor
    (many to one, section 3.5). Layer 0 is dense through `exact_layers`; as an anchor it selects
    with its query all the same. By default layer 1 is dense as well: ``exact_layers=0`` is the
    paper's.

    Notes
    -----
    Deviations from the paper, each an option or stated:

    - ``K = min(max(0.1 L, 128), L)`` is the option ``fraction`` = 0.1, with
      `budget_tokens` as its cap; by default K is `budget_tokens`, so that policies compare at
      equal numbers of tokens. A smaller selection is fetched, and what else is resident stays
      attended to: `budget_tokens` in all.
    - Candidates exclude sink and recent tokens, which are attended to anyway; the softmaxes
      that are pooled are over the candidates, the paper's over the whole context.
    - Positions enter a resident set that holds ``resident_factor`` selections (LRU); with
      ``fetch_cap`` at most that many rows come per head and step, best first.
    - Prefill is dense; the paper's is sparse by tiles of 128 queries. The first resident set is
      seeded in each layer from its own last prompt queries.
    - Layers between two anchors take the lower one, as there; layers that come after
      an exact anchor and are exact themselves take nothing.
    - Pre-softmax pooling, the paper's ablation, is ``pooling=mean_logit``.

    References
    ----------
    *Kascade: A Practical Sparse Attention Method for Long-Context LLM Inference*, sections
    3.2-3.6; anchors and head maps: `tandemkv.cache_rank.calibration`.
    """

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.SAME_STEP_QUERY, calibration="kascade", per_head=True
    )
    options_model: ClassVar[type[PolicyOptions]] = KascadeOptions
    options: KascadeOptions

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        if context.share is None:
            raise PolicyError(
                "policy=kascade needs anchor layers: give --calibration FILE (made by "
                "`tandemkv calibrate MODEL --policy kascade --out FILE`), or --anchors 0,2,..."
            )

    def num_wanted(self, lengths: torch.Tensor) -> torch.Tensor | None:
        """See `ScoringPolicy.num_wanted`: by ``fraction``."""
        fraction = self.options.fraction
        if fraction == 0.0:
            return None
        return torch.ceil(fraction * lengths).clamp(min=_MIN_SELECTED).minimum(lengths)
