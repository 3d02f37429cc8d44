# SPDX-License-Identifier: Apache-2.0
"""What values of `StatusReply` are called on ``/metrics``, in base units, and what they are."""

from __future__ import annotations

_UNITS = {"_us": 1e-6, "_ms": 1e-3, "_s": 1.0}
# Prometheus takes a counter's name without _total for the metric's own, which `pause_s` has.
_RENAMED = {"pause_ms_total": "paused_ms_total"}

HELP = {
    # of an inference rank
    "decode_steps_total": "Decode steps",
    "extend_steps_total": "Prefill passes; a chunk is one",
    "copied_prefix_tokens_total": "Tokens of prefixes that prefill copied to the model's GPU",
    "far_prefix_passes_total": "Prefill passes that read a prefix in place, which is slow",
    "dense_rows_total": "Decoded tokens that attended to all of a short context",
    "sparse_rows_total": "Decoded tokens that attended to selected tokens",
    "slow_rows_total": "Decoded tokens of a step in which the policy attends to all",
    "exact_rows_total": "Decoded tokens that attended to all because every layer is exact",
    "exact_layer_rows_total": "Layers that attended to all of a long context, per decoded token",
    "attended_tokens_total": "Tokens that decoded tokens attended to",
    "context_tokens_total": "Tokens of the contexts of decoded tokens",
    "seeded_rows_total": "Prefill passes of requests whose latest queries began a resident set",
    "exchange_wait_us_total": "Time that forward passes waited for a cache rank",
    "cache_rank_lost_total": "Losses of a cache rank",
    "pauses_total": "Pauses in which there was no cache rank",
    "pause_ms_total": "Time of ended pauses in which there was no cache rank",
    "longest_pause_ms": "The longest ended pause in which there was no cache rank",
    "dropped_passes_total": "Forward passes whose results were lost with a cache rank",
    "rewound_rows_total": "Requests that went back by a token after a loss",
    "prefilled_again_total": "Prompts that were computed again after a loss",
    "restored_rows_total": "Requests whose resident set a new cache rank found unchanged",
    "reseeded_rows_total": "Requests whose resident set a new cache rank chose anew",
    "recomputed_requests_total": "Requests that were computed again because K/V was lost",
    "requests_failed_total": "Requests that were ended because no cache rank came back",
    "requests_refused_total": "Requests that were refused because no cache rank came back",
    "forced_tokens_total": "Tokens that a request dictated",
    "resident_bytes": "Memory of the resident sets",
    "resident_slots": "Tokens of a resident set",
    "ring_slots": "Latest tokens that are always attended to",
    "request_rows": "Requests that have a row of SGLang's table",
    "slots": "Tokens that SGLang's KV pool has room for",
    "slots_used": "Tokens in SGLang's KV pool, those of the prefix cache included",
    "cache_rank_up": "1 while every cache rank serves, else 0",
    "pause_s": "Time since the cache rank was lost; 0 while it serves",
    "mapped_bytes": "Memory that this process and a cache rank both map",
    "plan_refresh_steps": "Steps between two selections of a request, at most",
    "plan_dense_tokens": "Longest context that is attended to as a whole",
    "plan_dense_batch_tokens": "Most tokens of a step of which all are attended to",
    "plan_scan_us": "Time of a layer's selection without transfers, measured at start",
    "plan_transfer_us": "Time of a layer's transfers, measured at start",
    "plan_layer_us": "Time of a layer of the model, measured at start",
    "plan_exposed_us": "Time that selecting adds to a layer, measured at start",
    "plan_is_hidden": "1 if selecting adds next to nothing to a layer, else 0",
    # of a cache rank
    "steps_total": "Steps of the engine",
    "resident_hits_total": "Selected tokens that were resident, per KV head",
    "resident_misses_total": "Selected tokens that were not resident, per KV head",
    "fetched_rows_total": "Tokens brought into resident sets, per KV head",
    "selections_total": "Selections, one per request and layer",
    "attended_by_policy_total": "Tokens that the policy itself attended to, per KV head",
    "protocol_errors_total": "Messages and steps that could not be handled",
    "refused_total": "Inference ranks that were refused",
    "malformed_frames_total": "Frames that could not be read",
    "busy_s": "Time that the present step has worked; 0 when idle",
    "num_resident": "Tokens of a resident set",
    "capacity_tokens": "Tokens that the KV pool has room for",
    "restored_rows": "Requests whose resident set was unchanged when this epoch resumed",
    "reseeded_rows": "Requests whose resident set was chosen anew when this epoch resumed",
    "announcement_seen_p50_us": "Time from a step's announcement until it is seen, median",
    "announcement_read_p50_us": "Time from a step's announcement until it is read, median",
    "announcement_queued_p50_us": "Time from a step's announcement until all is queued, median",
    "announcement_p50_us": "Time from a step's announcement until it begins, median",
    "announcement_p99_us": "Time from a step's announcement until it begins, 99th percentile",
    # of both
    "epochs_total": "Connections of an inference rank and a cache rank",
    "stalled_s": "Time for which work has not moved on; 0 when idle",
    "index_bytes": "Memory of the key index",
}
"""What a value is, by its name in the status."""


def exported(name: str) -> tuple[str, float]:
    """Return the name of a status value on ``/metrics``, and by what the value is multiplied.

    Times are in seconds there, as Prometheus asks for, whatever unit the status has them in.
    """
    name = _RENAMED.get(name, name)
    stem = name.removesuffix("_total")
    for unit, factor in _UNITS.items():
        if stem.endswith(unit):
            return f"{stem.removesuffix(unit)}_seconds{name[len(stem) :]}", factor
    return name, 1.0
