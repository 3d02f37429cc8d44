# SPDX-License-Identifier: Apache-2.0
"""A step of LFPS for some heads of one request in one layer. The policy says what it means."""

from __future__ import annotations

from typing import Any

import numpy as np

from .compile import compiled
from .lfps_tables import expanded_candidates, initial_candidates, refresh, thresholds, update
from .rows import add_row, prefetch_row, row_logits

_AHEAD = 8
"""Rows asked for ahead: they are scattered, no hardware guesses the next one."""
NUM_LOCAL = 6


@compiled
def _logits(pool: Any, slots: Any, head: Any, query: Any, scale: Any, out: Any) -> None:
    """Logits ``out[:, G]`` of the rows at `slots`."""
    dim = query.shape[1]
    bits = np.empty(dim, np.uint32)
    floats = bits.view(np.float32)
    count = slots.shape[0]
    for i in range(min(_AHEAD, count)):
        prefetch_row(pool, slots[i], head)
    for i in range(count):
        if i + _AHEAD < count:
            prefetch_row(pool, slots[i + _AHEAD], head)
        row_logits(pool, slots[i], head, query, scale, bits, floats, out[i])


@compiled
def _log_sum_exp(logits: Any, count: Any, g: Any) -> Any:
    highest = np.float32(-np.inf)
    for i in range(count):
        highest = max(highest, logits[i, g])
    if highest == -np.inf:
        return -np.inf
    total = 0.0
    for i in range(count):
        total += np.exp(logits[i, g] - highest)
    return highest + np.log(total)


@compiled
def sparsity(log_sink: Any, log_global: Any, log_local: Any) -> Any:
    """Return rho (Eq. 6) from the logarithms of the three weights."""
    return 1.0 / (1.0 + np.exp(log_global - log_sink) + np.exp(log_local - log_sink))


@compiled
def _count_new(k: Any, v: Any, slots: Any, lo: Any, n: Any, head: Any, state: Any) -> None:
    """Add the rows that became candidates to the sums of keys and values."""
    _, _, _, _, _, key_sum, value_sum, counted = state
    dim = key_sum.shape[1]
    one = np.ones(1, np.float32)
    bits = np.empty(dim, np.uint32)
    floats = bits.view(np.float32)
    row = np.zeros((1, dim), np.float32)
    for x in range(counted[head], n):
        row[:] = 0
        add_row(k, slots[lo + x], head, one, bits, floats, row)
        key_sum[head] += row[0]
        row[:] = 0
        add_row(v, slots[lo + x], head, one, bits, floats, row)
        value_sum[head] += row[0]
    counted[head] = n


@compiled
def _bypassed(
    k: Any, slots: Any, lo: Any, n: Any, length: Any, head: Any, query: Any, state: Any,
    scale: Any, epsilon: Any, log_global: Any, is_bypassed: Any,
) -> Any:  # fmt: skip
    """Decide which query heads of `head` are too sparse to look at (Eq. 5); return how many."""
    _, _, _, _, sigma2, key_sum, _, _ = state
    group, dim = query.shape
    sink = np.empty((lo, group), np.float32)
    _logits(k, slots[:lo], head, query, scale, sink)
    first = max(lo, length - 1 - NUM_LOCAL)
    local = np.empty((length - 1 - first, group), np.float32)
    _logits(k, slots[first : length - 1], head, query, scale, local)
    count = 0
    for g in range(group):
        norm2, along = 0.0, 0.0
        for d in range(dim):
            norm2 += query[g, d] * query[g, d]
            along += query[g, d] * key_sum[head, d]
        log_global[g] = np.log(n) + along / n * scale + 0.5 * norm2 * sigma2[head * group + g]
        rho = sparsity(
            _log_sum_exp(sink, lo, g), log_global[g], _log_sum_exp(local, local.shape[0], g)
        )
        is_bypassed[g] = rho > epsilon
        count += is_bypassed[g]
    return count


@compiled
def _exponentials(logits: Any, is_bypassed: Any, peak: Any) -> None:
    """Replace logits ``[m, G]`` by ``exp(logit - peak)``; writes `peak` ``[G]``.

    What is bypassed has 0.
    """
    count, group = logits.shape
    peak[:] = -np.inf
    for i in range(count):
        for g in range(group):
            peak[g] = max(peak[g], logits[i, g])
    for i in range(count):
        for g in range(group):
            logits[i, g] = 0.0 if is_bypassed[g] else np.exp(logits[i, g] - peak[g])


@compiled
def _pooled(weights: Any, count: Any, total: Any, out: Any) -> Any:
    """Mean ``out[:count]`` of the softmaxes of query heads; writes their sums `total`.

    Weights of a query head whose sum is not finite are set to 0. One whose sum is 0 has no part.
    Returns how many have one: if none has, the mean is 0.
    """
    group = weights.shape[1]
    total[:] = 0.0
    for i in range(count):
        for g in range(group):
            total[g] += weights[i, g]
    num_active = 0
    for g in range(group):
        if not np.isfinite(total[g]):  # its query or a key is not, or their product
            weights[:, g] = 0.0
            total[g] = 0.0
        num_active += total[g] > 0.0
    share = np.zeros(group, np.float32)
    for g in range(group):
        if total[g] > 0.0:
            share[g] = 1.0 / (total[g] * num_active)
    for i in range(count):
        mean = np.float32(0.0)
        for g in range(group):
            mean += weights[i, g] * share[g]
        out[i] = mean
    return num_active


@compiled
def _keep_best(chosen: Any, weights: Any, pooled: Any, count: Any, budget: Any) -> Any:
    """Move the `budget` best by `pooled` to the front, in place; return how many there are."""
    if count <= budget:
        return count
    edge = np.partition(pooled[:count], count - budget)[count - budget]
    num_above = 0
    for i in range(count):
        num_above += pooled[i] > edge
    num_equal = budget - num_above
    kept = 0
    for i in range(count):
        is_equal = pooled[i] == edge and num_equal > 0
        if pooled[i] > edge or is_equal:
            num_equal -= is_equal
            chosen[kept] = chosen[i]
            weights[kept] = weights[i]
            kept += 1
    return kept


@compiled
def _first_tables(pooled: Any, n: Any, head: Any, state: Any, decay: Any) -> None:
    """Fill empty tables from this step's weights of every candidate: Eq. 4 with s = 1."""
    tables, peaks, sums, unit, _, _, _, _ = state
    for x in range(n):
        tables[0, head, x] = pooled[x] * 0.5 / (1.0 - decay)
        tables[1, head, n - 1 - x] = tables[0, head, x]
    unit[head] = 1.0
    refresh(tables, peaks, sums, unit, head, n)


@compiled
def _first_variance(query: Any, logits: Any, head: Any, sigma2: Any) -> None:
    """Set ``sigma^2 / |q|^2`` from the logits of every candidate."""
    count, group = logits.shape
    for g in range(group):
        mean, square, norm2 = 0.0, 0.0, 0.0
        for x in range(count):
            mean += logits[x, g] / count
        for x in range(count):
            square += (logits[x, g] - mean) ** 2 / count
        for d in range(query.shape[1]):
            norm2 += query[g, d] * query[g, d]
        sigma2[head * group + g] = square / norm2 if norm2 > 0.0 else 0.0


@compiled
def lfps_heads(
    query: Any, k: Any, v: Any, slots: Any, lo: Any, n: Any, length: Any, state: Any,
    scale: Any, budget: Any, a: Any, decay: Any, epsilon: Any, bypass: Any,
    first: Any, last: Any, out: Any, attended: Any, candidates: Any,
) -> None:  # fmt: skip
    """Attend to what the tables point at, and bring them up to date, for heads ``[first, last)``.

    Parameters
    ----------
    query
        ``[Hq, D]`` float32.
    k, v
        ``[num_slots, H, D]`` float32, or bfloat16 seen as uint16.
    slots
        ``[length - 1]`` int32 or more: where each position is stored.
    lo, n, length
        Candidates are the positions ``[lo, lo + n)`` of `length`, the newest not stored yet.
    state
        Tables ``[2, H, capacity]`` and their peaks ``[2, H, capacity / BLOCK]`` float32; power
        sums ``[2, H, 4]``, unit ``[H]`` (0 while the tables are empty), sigma^2/|q|^2 ``[Hq]``,
        sums of keys and of values ``[H, D]``, all float64; counted rows ``[H]`` int64.
    bypass
        0 returns the mean value with the weight of the rest, 1 nothing, 2 the mean value alone.
    out
        ``[Hq, D + 1]`` float32: output and log-sum-exp; 0 and ``-inf`` for a query head that none
        of the candidates has a finite weight for.
    attended, candidates
        ``[H]`` int64: tokens attended to, and scored.
    """
    tables, peaks, sums, unit, sigma2, _, value_sum, _ = state
    dim = query.shape[1]
    group = query.shape[0] // k.shape[1]
    seen = np.zeros(n, np.uint8)
    found = np.empty(n, np.int32)
    chosen = np.empty(n, np.int32)
    is_bypassed = np.empty(group, np.bool_)
    log_global = np.empty(group, np.float64)
    peak = np.empty(group, np.float32)
    total = np.empty(group, np.float64)
    factor = np.empty(group, np.float32)
    output = np.empty((group, dim), np.float32)
    bits = np.empty(dim, np.uint32)
    floats = bits.view(np.float32)
    mean = np.empty(2, np.float64)
    tau = np.empty(2, np.float64)
    for head in range(first, last):
        own = query[head * group : (head + 1) * group]
        result = out[head * group : (head + 1) * group]
        _count_new(k, v, slots, lo, n, head, state)
        attended[head] = 0
        candidates[head] = 0
        is_empty = unit[head] == 0.0
        num_bypassed = 0
        is_bypassed[:] = False
        if n > budget and not is_empty:
            num_bypassed = _bypassed(
                k, slots, lo, n, length, head, own, state, scale, epsilon, log_global, is_bypassed
            )
        for g in range(group):
            if is_bypassed[g]:
                for d in range(dim):
                    result[g, d] = value_sum[head, d] / n
                result[g, dim] = log_global[g]
                if bypass == 1:
                    result[g, dim] = -np.inf
                elif bypass == 2:
                    result[g, dim] = 1e30
        if num_bypassed == group:
            continue
        if n <= budget or is_empty:
            count = n
            for x in range(n):
                chosen[x] = x
        else:
            for t in range(2):
                mean[t], tau[t] = thresholds(sums[t, head], n, a)
            count = initial_candidates(tables, peaks, head, n, tau, seen, found)
            count = expanded_candidates(tables, head, n, mean, seen, found, count, chosen)
        candidates[head] = count
        for g in range(group):  # until it is known otherwise, the rest has no part in this step
            if not is_bypassed[g]:
                result[g, :dim] = 0.0
                result[g, dim] = -np.inf
        if count == 0:  # no entry stands out
            continue
        where = np.empty(count, np.int32)
        for i in range(count):
            where[i] = slots[lo + chosen[i]]
        weights = np.empty((count, group), np.float32)
        _logits(k, where, head, own, scale, weights)
        if is_empty:
            _first_variance(own, weights, head, sigma2)
        _exponentials(weights, is_bypassed, peak)
        pooled = np.empty(count, np.float32)
        if _pooled(weights, count, total, pooled) == 0:
            continue  # nothing to learn from, either
        if is_empty:
            _first_tables(pooled, n, head, state, decay)
        kept = _keep_best(chosen, weights, pooled, count, budget)
        if kept < count:
            _pooled(weights, kept, total, pooled)
            for i in range(kept):
                where[i] = slots[lo + chosen[i]]
        output[:] = 0.0
        for i in range(min(_AHEAD, kept)):
            prefetch_row(v, where[i], head)
        for i in range(kept):
            if i + _AHEAD < kept:
                prefetch_row(v, where[i + _AHEAD], head)
            for g in range(group):
                factor[g] = weights[i, g] / total[g] if total[g] > 0.0 else 0.0
            add_row(v, where[i], head, factor, bits, floats, output)
        for g in range(group):
            if total[g] > 0.0:
                result[g, :dim] = output[g]
                result[g, dim] = peak[g] + np.log(total[g])
        attended[head] = kept
        if not is_empty:
            update(tables, peaks, sums, unit, head, n, chosen, pooled, kept, decay)
