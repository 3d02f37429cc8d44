# SPDX-License-Identifier: Apache-2.0
"""Settings of what is between the ranks, and of the store behind it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from .strict import Strict
from .token_count import TokenCount


class ExchangeSettings(Strict):
    """How the ranks talk."""

    layers_per_pack: int = Field(default=6, ge=1, le=128, description="Layers in one bulk message.")
    deterministic: bool = Field(
        default=True, description="Await every reply; lateness is an error instead of a stale set."
    )
    deadline_us: int = Field(
        default=2000,
        ge=10,
        le=60_000_000,
        description="Longest wait for a selection when not deterministic.",
    )
    transfer_timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="A transfer that takes longer ends the epoch."
    )
    heartbeat_interval_s: float = Field(
        default=1.0, gt=0, le=60, description="Seconds between two signs of life of each rank."
    )
    heartbeat_misses: int = Field(
        default=3, ge=1, le=60, description="Missed signs of life until a rank counts as lost."
    )
    transport: Literal["shared", "gloo", "nccl", "peer", "local"] = Field(
        default="shared",
        description="How the ranks meet: shared, in memory that both processes map (both on this "
        "host's CPU); nccl, between two GPUs; gloo, from a GPU to a cache rank on the CPU; peer: "
        "one process drives both GPUs; local: and on the same GPU.",
    )

    @property
    def is_in_process(self) -> bool:
        """Whether the inference rank's process drives the cache rank, on its GPU or another."""
        return self.transport in ("local", "peer")

    @property
    def is_shared(self) -> bool:
        """Whether the cache rank is another process that maps the inference rank's memory."""
        return self.transport == "shared"

    @property
    def has_pool(self) -> bool:
        """Whether the inference rank's process has all K/V in SGLang's pool."""
        return self.is_in_process or self.is_shared

    @property
    def is_peer(self) -> bool:
        """Whether that is another GPU: K/V lie there, and what is attended to lies here.

        In tests both may be one device (`one_device`), and all is done as if they were two.
        """
        return self.transport == "peer"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.transfer_timeout_s * 1e6 < self.deadline_us:
            raise ValueError("deadline_us must not exceed transfer_timeout_s")
        return self


class CacheSettings(Strict):
    """The store on the cache rank."""

    capacity_tokens: TokenCount = Field(
        default=65536, ge=256, le=1 << 30, description="Tokens that the cache rank holds in all."
    )
    poison_freed_slots: bool = Field(
        default=False, description="Fill freed slots with NaN, so that a stale read shows at once."
    )
