# SPDX-License-Identifier: Apache-2.0
"""Counters of the inference rank. Written by the scheduler thread, read by the status thread."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Names ending in ``_total`` only grow.

    `cache_rank_lost_total` counts what this rank has lost; `lost_by_other_ranks`, of its
    tensor-parallel group, is added where values are told.
    """

    decode_steps_total: int = 0
    extend_steps_total: int = 0
    copied_prefix_tokens_total: int = 0
    far_prefix_passes_total: int = 0
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
    pauses_total: int = 0
    pause_ms_total: int = 0
    longest_pause_ms: int = 0
    dropped_passes_total: int = 0
    rewound_rows_total: int = 0
    prefilled_again_total: int = 0
    restored_rows_total: int = 0
    reseeded_rows_total: int = 0
    recomputed_requests_total: int = 0
    requests_failed_total: int = 0
    requests_refused_total: int = 0
    forced_tokens_total: int = 0
    lost_by_other_ranks: int = 0

    def note_pause(self, seconds: float) -> None:
        """Count the end of a pause in which there was no cache rank."""
        milliseconds = round(seconds * 1e3)
        self.pause_ms_total += milliseconds
        self.longest_pause_ms = max(self.longest_pause_ms, milliseconds)

    def as_values(self) -> dict[str, float]:
        """Name to value."""
        found = {field.name: float(getattr(self, field.name)) for field in fields(self)}
        found["cache_rank_lost_total"] += found.pop("lost_by_other_ranks")
        return found
