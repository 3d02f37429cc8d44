# SPDX-License-Identifier: Apache-2.0
"""Both ranks with selections shared over layers, steps and heads: kascade, sfi, sync_kv.

With a covering budget each must give dense attention in float64, and with a small one each head
must hold exactly what the method says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from two_ranks import DIM, GROUP, HEADS, MODEL, World, check_residents, make_settings

from tandemkv.cache_rank.policies.base import LayerShare
from tandemkv.cache_rank.protocol.messages import RowFlag

SHARING = [
    {"policy": "kascade", "anchors": (0, 2), "exact_layers": (0,)},
    {"policy": "kascade", "anchors": (0, 1, 3), "exact_layers": (1,), "options": {"fraction": 0.1}},
    {"policy": "kascade", "anchors": (0,), "exact_layers": (), "refresh_every": 1},
    {"policy": "sfi"},
    {"policy": "sfi", "exact_layers": ()},
    {"policy": "sync_kv"},
    {"policy": "sync_kv", "exact_layers": (), "options": {"union": True}},
    {"policy": "look_ahead", "share_layers": True, "anchors": (0, 2), "exact_layers": (0, 1)},
    {"policy": "async_spade", "share_layers": True, "anchors": (0, 2), "exact_layers": ()},
    {"policy": "sfi", "share_layers": True, "anchors": (2,), "exact_layers": (0, 1)},
]


def name_of(selection: dict[str, Any]) -> str:
    return "-".join(str(value) for value in selection.values())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("selection", SHARING, ids=name_of)
@pytest.mark.parametrize("dense_while_fits", [True, False])
@pytest.mark.parametrize("prompt", [3, 40])
def test_sharing_with_a_covering_budget_is_dense_attention(
    selection: dict[str, Any], dense_while_fits: bool, prompt: int
) -> None:
    world = World(make_settings(**selection, dense_while_fits=dense_while_fits))
    assert world.extend([1, 2], [0, 0], [prompt, 5], last=True) < 1e-5
    for step in range(1, 25):
        error = world.decode([1, 2], [prompt + step, 5 + step])
        assert error < 1e-5, f"step {step}: {error}, {world.errors}"
    assert not world.errors
    assert world.cache_counters.stale_reads_total == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("selection", SHARING, ids=name_of)
def test_sharing_with_a_small_budget_keeps_the_books_straight(selection: dict[str, Any]) -> None:
    small = {"budget_tokens": 12, "resident_factor": 1.0}
    world = World(make_settings(**(small | selection)))
    world.extend([1, 2], [0, 0], [90, 10], last=True)
    errors = {}
    for step in range(1, 30):
        errors[step] = world.decode([1, 2], [90 + step, 10 + step])
        slow = [bool(row.flags & RowFlag.SLOW) for row in world.step.row_steps]
        if selection["policy"] == "sfi" and slow[0] and (slow[1] or 10 + step <= 22):
            assert errors[step] < 1e-5, f"a slow step is exact, {step}"
    assert not world.errors
    assert max(errors.values()) > 1e-3, "a sparse row cannot be dense"
    check_residents(world, layer=3, row=1, length=119)
    assert world.cache_counters.fetched_rows_total > 0
    assert world.cache_counters.stale_reads_total == 0
    assert world.cache_counters.withheld_packs_total == 0
    if selection["policy"] in ("sfi", "sync_kv"):
        assert 0 < world.runtime.counters.slow_rows_total < world.runtime.counters.sparse_rows_total


@pytest.mark.timeout(60)
def test_slow_steps_come_after_triggers_and_after_the_longest_interval() -> None:
    world = World(make_settings(policy="sfi", budget_tokens=12, resident_factor=1.0))
    world.extend([1], [0], [90], last=True)
    slow = []
    for length in range(91, 115):
        world.decode([1], [length])
        if world.step.row_steps[0].flags & RowFlag.SLOW:
            slow.append(length)
    # The first one; 99 and 110 end sentences; between them every sixth.
    assert slow == [91, 97, 99, 105, 110]


@pytest.mark.timeout(60)
def test_reuse_layers_hold_what_their_anchors_head_selected() -> None:
    """With R = sink + K and no cap the resident set is the selection itself."""
    world = World(
        make_settings(
            policy="kascade", anchors=(0, 2), exact_layers=(0,), budget_tokens=12,
            resident_factor=1.0, fetch_cap=12,
        )
    )  # fmt: skip
    world.extend([1], [0], [90], last=True)

    swapped = LayerShare((0, 0, 2, 2), ((0, 1), (0, 0), (0, 1), (1, 0)))
    object.__setattr__(world.session._epoch.policy.context, "share", swapped)
    for step in range(1, 4):
        world.decode([1], [90 + step])
    held = world.runtime.resident.positions[:, 1, :, :14].sort(dim=-1).values
    assert torch.equal(held[3, 0], held[2, 1])
    assert torch.equal(held[3, 1], held[2, 0])
    assert torch.equal(held[1, 0], held[1, 1])
    assert not torch.equal(held[2, 0], held[2, 1])
    q, k, _, _ = world.tensors(2, 1, 0, 93)
    logits = torch.einsum("hgd,nhd->hgn", q[-1].view(HEADS, GROUP, DIM).double(), k.double())
    best = (logits[..., 2:85] * MODEL.scale).softmax(-1).mean(1).topk(12).indices + 2
    want = torch.cat([torch.arange(2).expand(2, 2), best], dim=-1).sort(dim=-1).values
    assert torch.equal(held[2].long(), want)


@pytest.mark.timeout(60)
def test_followers_hold_what_their_representative_selected() -> None:
    world = World(
        make_settings(policy="sync_kv", budget_tokens=12, resident_factor=1.0, exact_layers=())
    )
    world.extend([1], [0], [90], last=True)
    for step in range(1, 10):
        world.decode([1], [90 + step])
    held = world.runtime.resident.positions[:, 1, :, :14].sort(dim=-1).values
    assert torch.equal(held[0, 0], held[0, 1])
    assert torch.equal(held[2, 0], held[2, 1])
    assert not torch.equal(held[1, 0], held[1, 1])
    # The static half: the last prompt query of head 1, layer 0 (Eq. 3).
    q, k, _, _ = world.tensors(0, 1, 0, 90)
    logits = torch.einsum("gd,nd->gn", q[-1].view(HEADS, GROUP, DIM)[1].double(), k[:, 1].double())
    static = (logits[:, 2:83] * MODEL.scale).softmax(-1).mean(0).topk(6).indices + 2
    assert set(static.tolist()) <= set(held[0, 0].tolist())
    # The dynamic half: the query of the second anticipation, six steps after the first.
    q, k, _, _ = world.tensors(0, 1, 0, 97)
    logits = torch.einsum("gd,nd->gn", q[-1].view(HEADS, GROUP, DIM)[1].double(), k[:, 1].double())
    scores = (logits[:, 2:90] * MODEL.scale).softmax(-1).mean(0)
    scores[static - 2] = 0
    dynamic = scores.topk(6).indices + 2
    assert set(held[0, 0].tolist()) == {0, 1, *static.tolist(), *dynamic.tolist()}
