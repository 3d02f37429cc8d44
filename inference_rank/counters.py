# SPDX-License-Identifier: Apache-2.0
"""Counters of the inference rank. Written by the scheduler thread, read by the status thread."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Names ending in ``_total`` only grow."""

    decode_steps_total: int = 0
    extend_steps_total: int = 0
    dense_rows_total: int = 0
    sparse_rows_total: int = 0
    slow_rows_total: int = 0
    exact_rows_total: int = 0
    exact_layer_rows_total: int = 0
    attended_tokens_total: int = 0
    context_tokens_total: int = 0
    seeded_rows_total: int = 0
    exchange_wait_us_total: int = 0
    epochs_total: int = 0
    cache_rank_lost_total: int = 0
    requests_failed_total: int = 0
    requests_refused_total: int = 0
    forced_tokens_total: int = 0

    def as_values(self) -> dict[str, float]:
        """Name to value."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}
