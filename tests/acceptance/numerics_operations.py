# SPDX-License-Identifier: Apache-2.0
"""The operations of item *numerics*, by the names of the functions that they call."""

from __future__ import annotations

import numerics_exact as exact
import numerics_float as floats
import numerics_lfps as lfps
from numerics_draw import Operation

OPERATIONS: dict[str, Operation] = {
    "attend_paged": floats.attention,
    "attend_samples": floats.samples,
    "merge_attention": floats.merge,
    "score_keys": floats.scores,
    "score_window": floats.window_scores,
    "score_topk": floats.choice,
    "predict_query": floats.query,
    "ridge_predict": floats.ridge,
    "push_and_predict": floats.query_windows,
    "apply_rope": floats.rope,
    "append_int8": floats.int8_index,
    "append_int4": floats.int4_index,
    "send_rows": floats.sent_rows,
    "lfps_heads": lfps.steps,
    "topk_positions": exact.topk,
    "pool_positions": exact.pooling,
    "mirror_diff": exact.mirror,
    "exchange_rows": exact.exchange,
    "append_tokens": exact.appended,
    "load_attended, load_ring": exact.attended_slots,
    "load_sample_slots, load_sample_moves": exact.sample_tables,
    "load_candidates": exact.candidates,
}
# `score_topk` has scratch of its own on a GPU, and is compared with the two halves of it in
# `tests/kernels/triton_fused_cases.py`; `lfps_heads` is for CPUs.
INTERPRETED = tuple(name for name in OPERATIONS if name not in ("score_topk", "lfps_heads"))
