# SPDX-License-Identifier: Apache-2.0
"""The operations of item *numerics*, by the names of the functions that they call."""

from __future__ import annotations

import numerics_attention as attention
import numerics_choice as choice
import numerics_lfps as lfps
import numerics_queries as queries
import numerics_scores as scores
import numerics_tables as tables
from numerics_draw import Operation

OPERATIONS: dict[str, Operation] = {
    "attend_paged": attention.attention,
    "attend_samples": attention.samples,
    "merge_attention": attention.merge,
    "score_keys": scores.scores,
    "score_window": scores.window_scores,
    "score_topk": scores.choice,
    "score_pages": scores.pages,
    "predict_query": queries.query,
    "ridge_predict": queries.ridge,
    "push_and_predict": queries.query_windows,
    "append_int8": scores.int8_index,
    "append_int4": scores.int4_index,
    "send_rows": attention.sent_rows,
    "lfps_heads": lfps.steps,
    "topk_positions": choice.topk,
    "pool_positions": choice.pooling,
    "mirror_diff": choice.mirror,
    "exchange_rows": tables.exchange,
    "append_tokens": tables.appended,
    "load_attended, load_ring": tables.attended_slots,
    "load_sample_slots, load_sample_moves": tables.sample_tables,
    "load_candidates": tables.candidates,
}
# `score_topk` has scratch of its own on a GPU, and is compared with the two halves of it in
# `tests/kernels/triton_fused_cases.py`; the others are for CPUs.
_NOT_INTERPRETED = ("score_topk", "lfps_heads", "merge_attention", "ridge_predict")
INTERPRETED = tuple(name for name in OPERATIONS if name not in _NOT_INTERPRETED)
