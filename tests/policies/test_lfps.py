# SPDX-License-Identifier: Apache-2.0
"""LFPS: each equation by hand, and whole runs against the printed equations in float64."""

import os
import sys

import numpy as np
import pytest
import torch
from lfps_bench import Bench
from lfps_reference import threshold
from numerics_draw import measure
from numerics_operations import OPERATIONS

from tandemkv.cache_rank.policies import lfps
from tandemkv.cache_rank.policies.attending import AttendInput
from tandemkv.cache_rank.policies.base import PolicyError, StoredKV
from tandemkv.cache_rank.policies.registry import resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.kernels.numba_ops.lfps import sparsity
from tandemkv.kernels.numba_ops.lfps_tables import (
    BLOCK,
    expanded_candidates,
    initial_candidates,
    refresh,
    thresholds,
    update,
)


def tables_of(vertical, slash):
    """State of one head with the given stored entries; `slash` by distance."""
    capacity = -(-len(vertical) // BLOCK) * BLOCK
    tables = np.zeros((2, 1, capacity), np.float32)
    tables[0, 0, : len(vertical)] = vertical
    tables[1, 0, : len(slash)] = slash
    state = (tables, np.zeros((2, 1, capacity // BLOCK), np.float32), np.zeros((2, 1, 4)))
    unit = np.ones(1)
    refresh(*state, unit, 0, len(vertical))
    return (*state, unit)


def test_eq4_by_hand():
    """Weights 1:2:3 and 1:2, worked on paper; c = 1 / (2 * 2 * 0.05) = 5."""
    bench = Bench(
        heads=1, group=1, dim=4, options={"rows": 2}, num_sink_tokens=1, num_recent_tokens=2
    )
    bench.q[:] = torch.tensor([2.0, 0, 0, 0])  # the scale is 1/2: a logit is the key's first entry
    bench.k[:, 0] = 0.0
    bench.k[:6, 0, 0] = torch.tensor([9.0, 1, 2, 3, 7, 7]).log()
    bench.start(6)
    vertical, slash = bench.table("vertical", 4)[0], bench.table("slash", 4)[0]
    np.testing.assert_allclose(vertical, 5 * np.array([1 / 6 + 1 / 3, 1, 1 / 2, 0]), rtol=1e-6)
    np.testing.assert_allclose(slash, 5 * np.array([1 / 2 + 2 / 3, 2 / 3, 1 / 6, 0]), rtol=1e-6)
    assert vertical.sum() == pytest.approx(0.5 / (1 - 0.95), rel=1e-6)  # Eq. 15
    logits = np.log([1.0, 2.0, 3.0])
    assert bench.state.arrays[4][0] == pytest.approx(logits.var() / 4.0, rel=1e-5)


def test_eq6_by_hand_and_without_overflow():
    assert sparsity(np.log(8.0), np.log(1.0), np.log(1.0)) == pytest.approx(0.8)
    assert sparsity(1000 + np.log(8.0), 1000.0, 1000.0) == pytest.approx(0.8)
    assert sparsity(-np.inf, 0.0, 0.0) == 0.0


def test_eq8_by_hand():
    """x = 0, 0, 0, 4: mean 1, sum of squares 12, of fourth powers 84, kurtosis 84/144."""
    _, _, sums, _ = tables_of([0.0, 0, 0, 4], [1.0, 1, 1, 1])
    mean, tau = thresholds(sums[0, 0], 4, 0.35)
    assert mean == pytest.approx(1.0)
    assert tau == pytest.approx(0.35 / (84 / 144))
    mean, tau = thresholds(sums[1, 0], 4, 0.35)
    assert (mean, tau) == (pytest.approx(1.0), pytest.approx(0.35 * 4))  # no peak: 1 / n


def test_eq7_and_eq9_by_hand():
    """Vertical peak at 3; slash peak at distance 1, which is candidate 8 of 10."""
    vertical = np.array([0.0, 0, 0.5, 9, 0, 0.9, 0, 0, 0, 0])
    slash = np.array([0.0, 8, 0.9, 0, 0, 0, 0, 0, 0, 0])  # candidates 9, 8, 7
    tables, peaks, _, _ = tables_of(vertical, slash)
    seen, found, out = np.zeros(10, np.uint8), np.empty(10, np.int32), np.empty(10, np.int32)
    count = initial_candidates(tables, peaks, 0, 10, np.array([1.0, 1.0]), seen, found)
    assert sorted(found[:count]) == [3, 8]
    # From 3: 2..5, of which 3 and 5 are above 0.7; from 8: 7, 8, 9, of which 7 and 8.
    count = expanded_candidates(tables, 0, 10, np.array([0.7, 0.85]), seen, found, count, out)
    assert sorted(out[:count]) == [3, 5, 7, 8]
    assert not seen.any()


def test_eq10_by_hand():
    """r = 1/2; C2 = {1, 3} with weights 3/4 and 1/4, so +1/2 and 0; one step later n is 5."""
    tables, peaks, sums, unit = tables_of([4.0, 2, 0, 8], [1.0, 2, 3, 4])
    chosen, weights = np.array([1, 3], np.int32), np.array([0.75, 0.25], np.float32)
    update(tables, peaks, sums, unit, 0, 4, chosen, weights, 2, 0.5)
    np.testing.assert_allclose(tables[0, 0, :4] * unit[0], [2.0, 1.5, 0, 4])
    # By candidate the slash table was 4, 3, 2, 1; decayed and updated: 2, 2, 1, 0.5.
    np.testing.assert_allclose(tables[1, 0, 3::-1] * unit[0], [2.0, 2, 1, 0.5])
    # Eq. 10 shifts it: what candidate i - 1 had, i has in the next step.
    np.testing.assert_allclose(tables[1, 0, 4::-1] * unit[0], [0.0, 2, 2, 1, 0.5])


@pytest.mark.parametrize("decay", [0.95, 0.3])
def test_sums_and_peaks_stay_true(decay):
    """Hundreds of updates, through the points where the unit is applied."""
    random = np.random.default_rng(1)
    n = 300
    state = tables_of(random.exponential(size=n), random.exponential(size=n))
    tables, peaks, sums, unit = state
    want = tables[:, 0, :n].astype(np.float64)
    applied = 0
    for _ in range(700):
        chosen = random.choice(n, 20, replace=False).astype(np.int32)
        weights = random.dirichlet(np.full(20, 0.3)).astype(np.float32)
        before = unit[0]
        update(*state, 0, n, chosen, weights, 20, decay)
        applied += unit[0] > before
        want *= decay
        want[0, chosen] += weights - 0.025
        want[1, n - 1 - chosen] += weights - 0.025
        for t in range(2):
            np.testing.assert_allclose(tables[t, 0, :n] * unit[0], want[t], rtol=2e-5, atol=2e-6)
            mean, tau = thresholds(sums[t, 0], n, 0.2)
            assert mean * unit[0] == pytest.approx(want[t].mean(), rel=1e-4, abs=1e-6)
            assert tau * unit[0] == pytest.approx(threshold(want[t], 0.2), rel=1e-3)
            blocks = tables[t, 0].reshape(-1, BLOCK).max(-1)
            assert (peaks[t, 0] >= blocks).all()
    assert applied >= 1


@pytest.mark.parametrize("options", [{}, {"threshold": 0.05}, {"sparsity": 0.02}])
@pytest.mark.parametrize("group", [1, 3])
def test_a_run_against_the_printed_equations(group, options):
    bench = Bench(group=group, options=options)
    references = bench.references()
    bench.start(200)
    for head, each in enumerate(references):
        rows = range(196, 200)
        each.start(np.stack([bench.group(head, p) for p in rows]), list(rows))
    scored = 0
    stored = bench.stored()
    for position in range(200, 280):
        found = bench.step(position, stored)
        want_scored = 0
        for head, each in enumerate(references):
            output, lse, candidates, chosen = each.step(bench.group(head, position), position)
            got = found.merged[0, head * group : (head + 1) * group].double().numpy()
            np.testing.assert_allclose(got[:, :-1], output, rtol=2e-4, atol=2e-5)
            np.testing.assert_allclose(got[:, -1], lse, rtol=1e-5, atol=1e-5)
            n = position + 1 - 8 - 2
            vertical = bench.table("vertical", n)[head]
            slash = bench.table("slash", n)[head]
            np.testing.assert_allclose(vertical, each.vertical[2:], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(slash[::-1], each.slash[2:], rtol=1e-4, atol=1e-5)
            want_scored += len(candidates)
            assert len(chosen) <= 24
        assert found.num_scored == want_scored
        scored += want_scored
    assert scored > 0
    assert any(each.num_bypassed for each in references) == ("sparsity" in options)


def test_random_shapes_and_options_against_the_printed_equations():
    """Some of those of item *numerics* of ``make acceptance``."""
    found = measure("lfps_heads", OPERATIONS["lfps_heads"], 6)
    assert found["failures"] == []
    assert 0 < found["largest_error"] <= 1


def test_reads_nothing_but_candidates_sink_and_local_rows():
    """Every other key and value is NaN."""
    bench = Bench(heads=1, group=2, options={"sparsity": 1.0})
    (each,) = bench.references()
    bench.start(300)
    each.start(np.stack([bench.group(0, p) for p in range(296, 300)]), list(range(296, 300)))
    stored = bench.stored()
    for position in range(300, 320):
        output, _, candidates, _ = each.step(bench.group(0, position), position)
        # The newest candidate enters the mean key.
        kept = {0, 1, position - 8, *range(position - 6, position), *(x + 2 for x in candidates)}
        hidden = [p for p in range(400) if p not in kept]
        assert len(hidden) > 200
        pools = []
        for pool in (stored.k, stored.v):
            poisoned = pool.clone()
            poisoned[bench.slots[hidden].long()] = float("nan")
            pools.append(poisoned)
        found = bench.step(position, StoredKV(*pools, stored.slots))
        np.testing.assert_allclose(found.merged[0, :, :-1].numpy(), output, rtol=2e-4, atol=2e-5)


def bypassing_bench(**selection):
    """The sink has nearly all the weight."""
    bench = Bench(heads=1, group=2, num_sink_tokens=2, **selection)
    bench.q[:, :, 0] = 6.0
    bench.k[:, :, 0] = -1.0
    bench.k[:2, :, 0] = 8.0
    return bench


def test_bypass_returns_the_mean_with_the_weight_of_the_rest():
    bench = bypassing_bench()
    (each,) = bench.references()
    bench.start(200)
    each.start(np.stack([bench.group(0, p) for p in range(196, 200)]), list(range(196, 200)))
    before = bench.table("vertical", 191).copy()
    found = bench.step(200)
    rho, log_global = each.rho(bench.group(0, 200), 200)
    assert (rho > 0.85).all()
    mean = bench.v[2:193, 0].double().mean(0)
    for g in range(2):
        torch.testing.assert_close(found.merged[0, g, :-1].double(), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.merged[0, :, -1], log_global, rtol=1e-5)
    assert found.num_scored == found.num_attended == 0
    np.testing.assert_array_equal(bench.table("vertical", 191), before)


@pytest.mark.parametrize(("bypass", "weight_of_rest"), [("sink", 0.0), ("mean", 1.0)])
def test_other_bypasses(bypass, weight_of_rest):
    bench = bypassing_bench(options={"bypass": bypass})
    bench.start(200)
    merged = bench.step(200).merged[0]
    local_lse = torch.zeros(2)  # of the inference rank's part
    weight = torch.softmax(torch.stack([local_lse, merged[:, -1]]), 0)[1]
    assert weight.tolist() == [weight_of_rest] * 2
    mean = bench.v[2:193, 0].mean(0)
    torch.testing.assert_close(merged[:, :-1], mean.expand(2, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prompt", [12, 200])
def test_a_covering_budget_is_attention_over_every_candidate(prompt):
    bench = Bench(budget_tokens=400, options={"sparsity": 0.01})
    bench.start(prompt)
    for position in range(prompt, prompt + 30):
        merged = bench.step(position).merged[0].double()
        k, v = (x[2 : position - 7].double().repeat_interleave(2, 1) for x in (bench.k, bench.v))
        logits = torch.einsum("hd,nhd->hn", bench.q[position].double(), k) * bench.model.scale
        output = torch.einsum("hn,nhd->hd", logits.softmax(-1), v)
        torch.testing.assert_close(merged[:, :-1], output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(merged[:, -1], logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_a_row_without_tables_takes_the_best_of_all_and_fills_them():
    bench = Bench(heads=1, group=1, budget_tokens=10)
    found = bench.step(60)
    keys = bench.k[2:53, 0].double()
    logits = keys @ bench.q[60, 0].double() * bench.model.scale
    best = logits.topk(10).values
    assert float(found.merged[0, 0, -1]) == pytest.approx(float(best.logsumexp(0)), rel=1e-6)
    assert (found.num_scored, found.num_attended) == (51, 10)
    weights = 10.0 * logits.softmax(0).numpy()  # 1 / (2 (1 - r))
    np.testing.assert_allclose(bench.table("vertical", 51)[0], weights, rtol=1e-4)
    np.testing.assert_allclose(bench.table("slash", 51)[0], weights[::-1], rtol=1e-4)
    assert bench.step(61).num_scored < 51


def test_tables_in_which_nothing_stands_out_have_no_part():
    bench = Bench(heads=1, group=2)
    bench.start(200)
    tables, peaks, sums, unit = bench.state.arrays[:4]
    tables[:, :, :191] = 1.0
    refresh(tables, peaks, sums, unit, 0, 191)
    found = bench.step(200)
    assert (found.merged[0, :, -1] == -torch.inf).all()
    assert (found.merged[0, :, :-1] == 0).all()
    assert (found.num_scored, found.num_attended) == (0, 0)


def test_bfloat16_is_read_as_it_is():
    half = Bench(dtype="bfloat16")
    whole = Bench()
    half.k, half.v = half.k.bfloat16().float(), half.v.bfloat16().float()
    whole.k, whole.v = half.k, half.v
    for bench in (half, whole):
        bench.start(200)
    for position in range(200, 220):
        assert torch.equal(half.step(position).merged, whole.step(position).merged)


def test_other_dtypes_are_refused():
    bench = Bench(dtype="float16")
    with pytest.raises(PolicyError, match="--dtype float32"):
        bench.step(60)


@pytest.mark.parametrize(
    ("cores", "given", "want"), [(64, "", 8), (6, "", 3), (1, "", 1), (64, "3,2", 3)]
)
def test_threads_leave_cores_to_others(cores, given, want, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert lfps.policy_threads() == want


@pytest.mark.parametrize("text", ["", "0", "auto", "-1", ",2"])
def test_threads_that_are_no_number_are_refused_in_words(text, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(SettingsError, match=f"OMP_NUM_THREADS='{text}' must be a positive number"):
        Bench()


def test_threads_requests_and_slots_change_nothing(monkeypatch):
    bench, threaded = Bench(heads=4), Bench(heads=4)
    monkeypatch.setattr(lfps, "_WORTH_THREADS", 4)
    bench.policy._num_threads, threaded.policy._num_threads = 1, 3
    for each in (bench, threaded):
        each.start(200)
    for position in range(200, 230):
        moved = torch.randperm(400, generator=torch.Generator().manual_seed(position))
        threaded.slots = moved.to(torch.int32)
        assert torch.equal(bench.step(position).merged, threaded.step(position).merged)


def test_requests_are_apart_and_padding_attends_to_nothing():
    bench, alone = Bench(), Bench()
    bench.start(200)
    alone.start(200)
    stored = bench.stored()
    want = alone.step(200)
    found = bench.policy.attend(
        AttendInput(
            layer=0,
            owners=[(0, 0), (1, 1), (2, 1)],
            query=bench.q[[7, 200, 50]],
            lengths=torch.tensor([1, 201, 51]),
            lo=torch.tensor([2, 2, 2]),
            hi=torch.tensor([0, 193, 43]),
            stored=StoredKV(stored.k, stored.v, stored.slots.expand(3, -1)),
            budget=24,
        )
    )
    assert torch.equal(found.merged[1], want.merged[0])
    assert (found.merged[0, :, -1] == -torch.inf).all()
    assert (found.merged[0, :, :-1] == 0).all()
    assert set(bench.policy._states) == {(1, 1), (2, 1)}
    bench.policy.release((1, 1))
    assert set(bench.policy._states) == {(2, 1)}


def test_without_numba_the_error_says_what_to_install(monkeypatch):
    for name in [m for m in sys.modules if m.startswith("tandemkv.kernels.numba_ops")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(PolicyError, match=r"pip install 'tandemkv\[lfps\]'"):
        Bench()


@pytest.mark.parametrize(
    "change", [{"refresh_every": 2}, {"num_sink_tokens": 0}, {"share_layers": True}]
)
def test_settings_that_do_not_go_together(change):
    with pytest.raises(ValueError, match="policy=lfps"):
        resolve_selection({"policy": "lfps", **change})
    resolve_selection({"policy": "lfps"})


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(PolicyError, match=r"budget_tokens=0: .*--budget-tokens.*streaming"):
        Bench(budget_tokens=0)
    bench = Bench(budget_tokens=1, group=1)
    bench.start(200)
    assert bench.step(200).num_attended == 2  # one of each KV head


def attend_to_two(bench, query):
    """A step of the requests (1, 1) and (2, 1), of 201 tokens each; `query` is of the second."""
    stored = bench.stored()
    return bench.policy.attend(
        AttendInput(
            layer=0,
            owners=[(1, 1), (2, 1)],
            query=torch.stack([bench.q[200], query]),
            lengths=torch.tensor([201, 201]),
            lo=torch.tensor([2, 2]),
            hi=torch.tensor([193, 193]),
            stored=StoredKV(stored.k, stored.v, stored.slots.expand(2, -1)),
            budget=bench.selection.budget_tokens,
        )
    )


@pytest.mark.parametrize("budget", [12, 400])
@pytest.mark.parametrize("has_tables", [True, False])
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e38])
def test_a_query_that_is_not_finite_spoils_its_own_request_alone(factor, has_tables, budget):
    bench, alone = (Bench(options={"sparsity": 1.0}, budget_tokens=budget) for _ in range(2))
    alone.start(200)
    bench.start(200)
    if has_tables:
        bench.owner = (2, 1)
        bench.start(200)
    found = attend_to_two(bench, bench.q[200] * factor).merged
    assert torch.equal(found[0], alone.step(200).merged[0])
    assert (found[1, :, -1] == -torch.inf).all()
    assert (found[1, :, :-1] == 0).all()
    again = attend_to_two(bench, bench.q[200]).merged  # its tables learnt nothing from that
    assert again.isfinite().all()
    if has_tables:
        assert torch.equal(again[1], found[0])


def test_a_query_head_that_is_not_finite_leaves_the_others_of_its_group():
    bench = Bench(heads=1, group=2, options={"sparsity": 1.0})
    bench.start(200)
    bench.q[200, 0] *= 1e38
    found = bench.step(200).merged[0]
    assert (found[0] == torch.tensor([0.0] * 16 + [-torch.inf])).all()
    assert found[1].isfinite().all()
    assert all(np.isfinite(x).all() for x in bench.state.arrays)


def test_a_query_head_of_which_nothing_was_kept_has_no_part():
    """The best of the group, to be the only one, is so far from another's that this has 0."""
    bench = Bench(heads=1, group=2, positions=70, budget_tokens=1, options={"sparsity": 1.0})
    bench.k.zero_()
    bench.k[20, 0, 0] = bench.k[30, 0, 1] = 1e3
    bench.q.zero_()
    bench.q[:, 0, 0] = bench.q[:, 1, 1] = 10.0
    found = bench.step(60)
    assert found.num_attended == 1
    assert torch.equal(found.merged[0, 0, :-1], bench.v[20, 0])
    assert found.merged[0, 0, -1] == pytest.approx(1e4 * bench.model.scale)
    assert (found.merged[0, 1] == torch.tensor([0.0] * 16 + [-torch.inf])).all()
