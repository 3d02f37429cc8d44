# SPDX-License-Identifier: Apache-2.0
"""Settings of what is between the ranks, and of the K/V behind it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandemkv.cache_rank.protocol.models.model_spec import FP8_KV

from .frozen_model import FrozenModel
from .token_count import TokenCount


class ExchangeSettings(FrozenModel):
    """How the ranks meet."""

    transfer_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="Longest time for the ranks to map each other's memory, in which the cache "
        "rank builds its engine, and for it to be busy with one step.",
    )
    heartbeat_interval_s: float = Field(
        default=1.0, gt=0, le=60, description="Seconds between two signs of life of each rank."
    )
    heartbeat_misses: int = Field(
        default=3, ge=1, le=60, description="Missed signs of life until a rank counts as lost."
    )
    recovery_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Longest pause without a cache rank; then requests end with HTTP 503.",
    )


class CacheSettings(FrozenModel):
    """The K/V of all requests."""

    capacity_tokens: TokenCount = Field(
        default=65536,
        ge=256,
        le=1 << 30,
        description="Tokens whose K/V are held, over all requests.",
    )
    kv_dtype: Literal["auto", "fp8_e4m3"] = Field(
        default="auto",
        description="Dtype of K and V, in the pool and in resident sets: the model's own, or FP8 "
        "without scales, which halves both.",
    )

    @property
    def stored_dtype(self) -> str | None:
        """Torch name of the dtype of K and V; None for the model's own."""
        return FP8_KV if self.kv_dtype == "fp8_e4m3" else None
