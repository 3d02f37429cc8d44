# SPDX-License-Identifier: Apache-2.0
"""Policies that attend on the cache rank: the query goes there, the output comes back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .base import Owner, Policy, SeedInput, StoredKV


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendInput:
    """One decode step in one layer, for S requests."""

    layer: int
    """The layer."""
    owners: Sequence[Owner]
    """The requests."""
    query: torch.Tensor
    """``[S, num_qo_heads, head_dim]``: the true query, after RoPE."""
    lengths: torch.Tensor
    """``[S]`` int64: tokens of each request; the newest, ``length - 1``, is not stored yet."""
    lo: torch.Tensor
    hi: torch.Tensor
    """``[S]`` int64: the positions ``[lo, hi)`` are attended to here, the others (sink and recent)
    on the inference rank. None if ``hi <= lo``."""
    stored: StoredKV
    """Slots of the positions ``[0, max(lengths))``."""
    budget: int
    """K, positions per KV head."""


@dataclass(frozen=True, slots=True)
class Attended:
    """Output and, last, natural log-sum-exp ``[S, num_qo_heads, head_dim + 1]`` float32.

    A log-sum-exp of ``-inf`` means that nothing was attended to. `num_scored` and
    `num_attended` count tokens over requests and KV heads.
    """

    merged: torch.Tensor
    num_scored: int
    num_attended: int


class AttendingPolicy(Policy):
    """A policy with `Timing.SAME_STEP_ATTENTION`; its resident set is the sink alone.

    What is attended to here and on the inference rank must not overlap.
    """

    @abstractmethod
    def attend(self, request: AttendInput) -> Attended:
        """Attend to some of the positions ``[lo, hi)``, to all if the budget covers them."""

    def observe_stored(self, request: SeedInput) -> None:
        """Take note of the end of a prompt, its K and V included."""
        del request
