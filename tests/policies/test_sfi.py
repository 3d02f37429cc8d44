# SPDX-License-Identifier: Apache-2.0
"""SFI's Selector, each equation worked by hand in float64, and the policy around it."""

import math

import pytest
import torch

from tandemkv.cache_rank.policies.base import PolicyError, SeedInput, StoredKV
from tandemkv.cache_rank.policies.sfi import (
    SFIOptions,
    exclude_across_heads,
    fuse,
    power_mean_evidence,
    prior,
    soft_nms,
)
from tandemkv.cache_rank.protocol.messages import RefreshRule, Timing
from tandemkv.kernels.score import score_window

ALL = torch.ones(3, dtype=torch.bool)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_power_mean_of_two_queries():
    """Eq. 7 and 8 with alpha = 1/2 on (.64, .36, 0) and (.04, .36, .60)."""
    probs = f64([0.64, 0.36, 0.0], [0.04, 0.36, 0.6])
    mu = [(0.8 + 0.2) / 2, 0.6, math.sqrt(0.6) / 2]
    squares = [m * m for m in mu]  # mu^(1 / alpha): .25, .36, .15
    assert squares == pytest.approx([0.25, 0.36, 0.15])
    close(power_mean_evidence(probs, ALL, 0.5), f64(0.25, 0.36, 0.15) / 0.76)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.1, 0.01, 0.001])
def test_power_mean_of_any_exponent_in_float32(alpha):
    """Also of what some queries have no weight for: the mean's power underflows there."""
    generator = torch.Generator().manual_seed(3)
    probs = (6 * torch.randn(16, 2, 200, generator=generator, dtype=torch.float64)).softmax(-1)
    probs[:3, 0] = 0.0  # underflows at the least exponent: (13 / 16) ** 1000
    allowed = torch.ones(2, 200, dtype=torch.bool)
    logs = torch.logsumexp(alpha * probs.log(), 0) / alpha
    want = torch.softmax(logs, -1)
    got = power_mean_evidence(probs.float(), allowed, alpha).double()
    torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-9)
    assert power_mean_evidence(probs.float(), ~allowed, alpha).eq(0).all()


@pytest.mark.parametrize("options", [{"alpha": 0.001}, {"temperature": 0.001}])
def test_the_least_values_leave_an_order(make_bench, queries, options):
    bench = make_bench("sfi", options=options)
    assert (bench.select([queries[0]]) >= 0).all()
    for option in options:
        for less in (0.0009, 1e-39):
            with pytest.raises(PolicyError, match=rf"sfi\.{option}=.*accepted: number 0\.001 to"):
                make_bench("sfi", options={option: less})


def test_the_least_temperature_gives_each_position_to_a_head():
    z = torch.tensor([[-18.0, 0.0, -300.0], [-18.5, -0.5, -1.0]])
    got = exclude_across_heads(z, SFIOptions(cross=1.0, temperature=0.001))
    assert got.isfinite().all()
    assert torch.equal(got[0, :2], z[0, :2])
    assert torch.equal(got[1, 2], z[1, 2])


def test_one_query_is_its_own_evidence():
    probs = f64([0.7, 0.2, 0.1])
    assert torch.equal(power_mean_evidence(probs, ALL, 0.5), probs[0])


def test_prior_by_hand():
    """Eq. 9-12 with gamma 1, beta ln 2, p 1, eta 1; J = positions 1 to 3 of 4.

    u = 0, 1/2, 1. Norms 1, 2, 4: factors 1, 1/2, 1/4. Decay 1, 2^-1/2, 1/2. Brake 1, 1/2, 0.
    """
    allowed = torch.tensor([False, True, True, True])
    options = SFIOptions(norm_exponent=1.0, decay=math.log(2), decay_power=1.0, tail_brake=1.0)
    got = prior(f64(9.0, 1.0, 2.0, 4.0), allowed, options)
    eps = 1e-8
    u = f64(0.0, 1.0, 2.0) / (2.0 + eps)
    weights = 2.0**-u * (1.0 - u + eps) / (f64(1.0, 2.0, 4.0) + eps)
    torch.testing.assert_close(weights, f64(1.0, 0.5 * 2**-0.5 * 0.5, 0.0), rtol=0.0, atol=1e-7)
    close(got, f64(0.0, *(weights / weights.sum())))


def test_prior_brakes_the_tail_by_epsilon():
    """At u = 1 the brake is epsilon^eta, not nothing, in float32 too."""
    eps = 1e-8
    for dtype in (torch.float64, torch.float32):
        options = SFIOptions(norm_exponent=0.0, decay=0.0, decay_power=2.0, tail_brake=1.0)
        got = prior(torch.ones(3, dtype=dtype), ALL, options)
        weights = f64(1.0, 0.5, eps)
        torch.testing.assert_close(got.double(), weights / weights.sum(), rtol=1e-6, atol=1e-8)


def test_fusion_by_hand():
    """Eq. 18: |f|^2 = .5, f.r = 1/3, |r|^2 = 1/3: lambda = (1/6) / (1/6) = 1, clipped."""
    f, r = f64(0.0, 0.5, 0.5), f64(1 / 3, 1 / 3, 1 / 3)
    close(fuse(f, r, 1.0), r)
    close(fuse(f, r, 0.02), 0.98 * f + 0.02 * r)
    # (.8, .2) and (.2, .8): |f|^2 = |r|^2 = .68, f.r = .32: (.36) / (.72) = 1/2.
    close(fuse(f64(0.8, 0.2), f64(0.2, 0.8), 1.0), f64(0.5, 0.5))
    close(fuse(f, f, 0.5), f)


def test_the_fusion_is_the_least_sharp_mixture():
    """Eq. 17: no other lambda within the clip gives a smaller |s|^2."""
    generator = torch.Generator().manual_seed(0)
    f, r = torch.rand(2, 9, generator=generator, dtype=torch.float64).softmax(-1)
    for clip in (0.1, 1.0):
        best = fuse(f, r, clip).square().sum()
        grid = torch.linspace(0, clip, 500, dtype=torch.float64)[:, None]
        assert best <= ((1 - grid) * f + grid * r).square().sum(-1).min() + 1e-12


def test_soft_nms_by_hand():
    """Eq. 20, 21: strength 1/2, neighbours 1: the gaps are 0, 2, 1, 0 behind a hole."""
    z = f64(-1.0, -3.0, -2.0, -math.inf, -9.0)
    got = soft_nms(z, SFIOptions(nms=0.5, nms_radius=1))
    assert got.tolist() == [-1.0, -4.0, -2.0, -math.inf, -9.0]
    wide = soft_nms(z, SFIOptions(nms=0.5, nms_radius=2))
    assert wide.tolist() == [-1.0, -4.0, -2.5, -math.inf, -12.5]
    assert soft_nms(z, SFIOptions(nms=0.5, nms_radius=0)).tolist() == z.tolist()


def test_heads_compete_by_hand():
    """Eq. 22, 23: at equal scores each of two heads holds half; at ln 3 apart 3/4 and 1/4."""
    z = f64([0.0, math.log(3.0), -math.inf], [0.0, 0.0, -math.inf])
    got = exclude_across_heads(z, SFIOptions(cross=0.35, temperature=1.0))
    close(got[:, 0], f64(0.0, 0.0) + 0.35 * math.log(0.5))
    close(got[:, 1], f64(math.log(3.0) + 0.35 * math.log(0.75), 0.35 * math.log(0.25)))
    assert got[:, 2].isneginf().all()
    cold = exclude_across_heads(z, SFIOptions(cross=1.0, temperature=0.01))
    close(cold[1, 1], torch.tensor(math.log(1e-8), dtype=torch.float64))


def test_selects_by_the_whole_chain(make_bench, queries):
    """The policy against the equations written out once more, in float64."""
    bench = make_bench("sfi")
    s = bench.context.selection
    query = queries[0]
    got = bench.select([query])
    for row, length in enumerate(bench.lengths):
        hi = length - s.num_recent_tokens
        keys = bench.k[bench.slots[row, 4:hi].long()].double()  # [n, H, D]
        logits = torch.einsum("hgd,nhd->hgn", query[row].double().view(2, 3, 8), keys) / 8**0.5
        f = logits.softmax(-1).mean(1)
        u = torch.arange(hi - 4, dtype=torch.float64) / (hi - 5)
        r = keys.norm(dim=-1).t() ** -1 * torch.exp(-(u**2)) * (1 - u + 1e-8)
        r = r / r.sum(-1, keepdim=True)
        best = ((f * f).sum(-1) - (f * r).sum(-1)) / ((f - r) ** 2).sum(-1)
        weight = best.clamp(0, 0.02)[:, None]
        z = torch.log((1 - weight) * f + weight * r + 1e-8)
        padded = torch.cat([z[:, :1], z, z[:, -1:]], dim=1)
        peak = torch.stack([padded[:, :-2], z, padded[:, 2:]]).amax(0)
        z = z - 0.5 * (peak - z)
        z = z + 0.35 * z.softmax(0).log()
        want = z.topk(24).indices + 4
        assert torch.equal(got[row].long(), want)


def test_neutral_settings_leave_the_oracle(make_bench, queries):
    neutral = {"options": {"lambda_clip": 0.0, "nms": 0.0, "cross": 0.0}}
    ours, oracle = make_bench("sfi", **neutral), make_bench("oracle")
    assert torch.equal(ours.select(queries), oracle.select(queries))


def test_the_prefill_tail_is_a_window(make_bench, queries):
    """The seed's evidence is the power mean of the last W = 2 queries, each causal."""
    neutral = {"options": {"lambda_clip": 0.0, "nms": 0.0, "cross": 0.0, "window": 2}}
    bench = make_bench("sfi", **neutral)
    prompt = torch.stack([query[0] for query in queries[:5]])
    positions = torch.arange(65, 70)
    slots = bench.slots[0]
    request = SeedInput(
        layer=1,
        owner=(1, 1),
        queries=prompt,
        positions=positions,
        score=lambda q, at: score_window(q, bench.k, slots, 4, 67, at, scale=8**-0.5),
        lo=4,
        hi=67,
        stored=StoredKV(bench.k, bench.k, slots[None]),
        budget=24,
    )
    got = bench.policy.seed_scores(request)
    keys = bench.k[slots[4:67].long()].double()
    logits = torch.einsum("whgd,nhd->whgn", prompt[-2:].double().view(2, 2, 3, 8), keys) / 8**0.5
    probs = logits.softmax(-1).mean(2)
    mu = probs.sqrt().mean(0).square()
    want = torch.log(mu / mu.sum(-1, keepdim=True) + 1e-8)
    torch.testing.assert_close(got[:, 4:].double(), want, rtol=1e-5, atol=1e-5)
    assert got[:, :4].isneginf().all()
    pooling = make_bench("sfi", pool_before=2, **neutral)
    pooled = pooling.policy.seed_scores(request)
    assert torch.equal(pooled[:, 6:], got.unfold(1, 3, 1).amax(-1)[:, 4:])


def test_what_it_declares(make_bench):
    policy = make_bench("sfi").policy
    assert policy.capabilities.timing is Timing.EXACT_STEP
    assert policy.options.declare(policy.capabilities).refresh is RefreshRule.BOUNDARY
    with pytest.raises(PolicyError, match="softmax_mean"):
        make_bench("sfi", pooling="max_logit")
