# SPDX-License-Identifier: Apache-2.0
"""What the class of a policy and its options declare, as settings and both ranks read it.

The protocol tree imports no policy, and the inference rank none either: who makes the settings
enters this once (`tandemkv.cache_rank.policies.registry.selection_values`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandemkv.cache_rank.protocol.messages import RefreshRule, Timing

from .frozen_model import FrozenModel

DEFAULT_SAMPLES = 1024
"""Tokens that stand for the rest, for policies that gain by them (docs/quality.md)."""


class DeclaredPolicy(FrozenModel):
    """A policy's declaration; by default that of the default policy, `look_ahead`.

    The first seven are entered from the policy's class (of `PolicyCapabilities`, those of the same
    names), the others from its options.
    """

    timing: Timing = Timing.SAME_STEP_HIDDEN
    """When its selection is used."""
    all_exact: bool = False
    """Whether every layer attends to everything."""
    default_samples: int = Field(default=DEFAULT_SAMPLES, ge=0, le=1024)
    """Samples that it gains by."""
    refresh: RefreshRule = RefreshRule.NEVER
    """Which steps of a sparse row are slow."""
    is_captured: bool = True
    """Whether a GPU captures its decode steps (`tandemkv.cache_rank.policies.composition`)."""
    wants_query_window: bool = False
    """Whether it is told the queries of every step."""
    index: Literal["keys", "page_bounds"] = "keys"
    """What its selection reads."""
    layers_ahead: int = Field(default=1, ge=0, le=8)
    """Layers between the residual stream and the query that it predicts, if queries are."""
    predictor: str = Field(default="", max_length=4096)
    """File of fitted projections that queries are predicted with; empty: the model's own W_q."""
    refresh_interval: int = Field(default=1, ge=1, le=65536)
    """Steps from one slow step to the next, at most."""
    refresh_triggers: str = Field(default="", max_length=256)
    """Characters: a token that ends in one makes the step slow that takes it in."""

    @property
    def keeps_sink_only(self) -> bool:
        """Whether nothing but the sink is resident: it selects nothing, or attends elsewhere."""
        return self.timing in (Timing.NONE, Timing.SAME_STEP_ATTENTION)

    @property
    def attends(self) -> bool:
        """Whether the policy attends on the cache rank."""
        return self.timing is Timing.SAME_STEP_ATTENTION

    @property
    def predicts_from_hidden(self) -> bool:
        """Whether queries are predicted from the residual stream of an earlier layer."""
        return self.timing is Timing.SAME_STEP_HIDDEN

    @property
    def has_slow_steps(self) -> bool:
        """Whether it selects in slow steps only, and then all of it."""
        return self.timing is Timing.EXACT_STEP
