# SPDX-License-Identifier: Apache-2.0
"""`score_topk` is a choice among float64 scores; its errors."""

from dataclasses import replace

import pytest
import torch
from score_inputs import among_others, expected, make_keys, scan_of

from tandemkv.kernels import select
from tandemkv.kernels.score import POOLINGS, KeyScan
from tandemkv.kernels.select import make_select_scratch, score_topk


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_chooses_the_best(kind: str, pooling: str) -> None:
    torch.manual_seed(3)
    keys = make_keys(
        kind, num_reqs=3, heads=2, group=2, dim=16, page_size=16, num_pages=30
    )  # fmt: skip
    lo, hi = [4, 0, 7], [150, 9, 160]
    scratch = make_select_scratch(3, 4, 2, 160, 20, keys.q.device)
    scan = scan_of(
        keys, torch.tensor(lo), torch.tensor(hi), width=160, scale=0.25, pooling=pooling,
        active=torch.tensor([True, True, False]),
    )  # fmt: skip
    positions, scores = score_topk(scan, 20, scratch=scratch)
    for req in range(2):
        want = expected(keys, req, lo[req], hi[req], pooling, 0.25)
        count = min(20, hi[req] - lo[req])
        for head in range(2):
            best = want[head].topk(count)
            chosen = positions[req, head, :count].sort().values
            assert torch.equal(chosen, (best.indices + lo[req]).sort().values.int())
            torch.testing.assert_close(
                scores[req, head, :count].sort(descending=True).values.double(), best.values,
                rtol=1e-4, atol=1e-4,
            )  # fmt: skip
        assert bool((positions[req, :, count:] == -1).all())
    assert bool((positions[2] == -1).all())
    assert bool((scores[2] == -torch.inf).all())


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_keys_of_some_channels_of_queries(kind: str) -> None:
    torch.manual_seed(5)
    keys = make_keys(kind, num_reqs=2, heads=3, group=2, dim=16, page_size=16, num_pages=20)
    wide, channels = among_others(keys.q, 3)
    scan = scan_of(keys, torch.tensor([4, 0]), torch.tensor([150, 90]), width=160, scale=0.25)
    want = score_topk(scan, 20)
    found = score_topk(replace(scan, q=wide, channels=channels), 20)
    assert torch.equal(found[0], want[0])
    assert torch.equal(found[1], want[1])
    for wrong in (channels[:2], channels[:, :8], channels.int(), channels.T.contiguous().T):
        with pytest.raises(ValueError, match="channels"):
            score_topk(replace(scan, q=wide, channels=wrong), 20)
    with pytest.raises(ValueError, match="head_dim"):
        score_topk(replace(scan, q=wide), 20)


def test_pools_over_positions() -> None:
    torch.manual_seed(4)
    keys = make_keys("float32", num_reqs=1, heads=2, group=2, dim=16, page_size=16, num_pages=10)
    scan = scan_of(keys, torch.tensor([4]), torch.tensor([150]), width=160, scale=0.25)
    positions, scores = score_topk(scan, 15, pooled_positions=(3, 1))
    want = expected(keys, 0, 4, 150, "softmax_mean", 0.25)
    for head in range(2):
        best = int(want[head].argmax())
        near = range(max(4, best + 3), min(150, best + 8))  # `want` begins at position 4
        assert set(near) <= set(positions[0, head].tolist())
        assert float(scores[0, head].max()) == pytest.approx(float(want[head].max()), rel=1e-4)
    with pytest.raises(ValueError, match="after=32"):
        score_topk(scan, 15, pooled_positions=(0, 32))


def test_what_no_request_has_come_to_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A width is that of the longest context; in plain torch all of it would be written and read.

    Nor does it change what is chosen.
    """
    widths, scored = [], select.score_keys

    def noted(keys: KeyScan) -> torch.Tensor:
        widths.append(keys.width)
        return scored(keys)

    monkeypatch.setattr(select, "score_keys", noted)
    torch.manual_seed(7)
    keys = make_keys("float32", num_reqs=2, heads=2, group=2, dim=16, page_size=16, num_pages=60)
    lo = torch.tensor([4, 0])
    scan = scan_of(keys, lo, torch.tensor([150, 90]), width=150, scale=0.25)
    wide = replace(scan, slots=torch.nn.functional.pad(scan.slots, (0, 50)), width=800)
    for pooled in ((0, 0), (3, 1)):
        want = score_topk(scan, 20, pooled_positions=pooled)
        found = score_topk(wide, 20, pooled_positions=pooled)
        assert torch.equal(found[0], want[0])
        assert torch.equal(found[1], want[1])
    assert widths == [150] * 4
    nothing = replace(wide, hi=torch.tensor([0, -3]))
    assert bool((score_topk(nothing, 20)[0] == -1).all())


def test_errors_name_the_argument() -> None:
    k_pool, q = torch.zeros(8, 2, 4), torch.zeros(1, 4, 4)
    slots, lo, hi = torch.arange(6)[None], torch.tensor([0]), torch.tensor([6])
    with pytest.raises(ValueError, match="width=7"):
        score_topk(KeyScan(q, k_pool, slots, lo, hi, width=7, scale=1.0), 2)
    scan = KeyScan(q, k_pool, slots, lo, hi, width=6, scale=1.0)
    with pytest.raises(ValueError, match="k=-1"):
        score_topk(scan, -1)
    with pytest.raises(ValueError, match="pooling='mean'"):
        score_topk(replace(scan, pooling="mean"), 2)
    with pytest.raises(ValueError, match="active"):
        score_topk(replace(scan, active=torch.zeros(2)), 2)
    scratch = make_select_scratch(1, 4, 2, 6, 2, q.device)
    two = replace(scan, q=q[[0, 0]], slots=slots[[0, 0]], lo=lo[[0, 0]], hi=hi[[0, 0]])
    with pytest.raises(ValueError, match="make_select_scratch"):
        score_topk(two, 2, scratch=scratch)
