# SPDX-License-Identifier: Apache-2.0
"""Samples through both ranks: what they stand for is what is not resident, step after step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from two_ranks import GROUP, HEADS, LAYERS, MODEL, World, check_residents, make_settings

from tandemkv.kernels.samples import sample_offsets

SINK, RECENT, SAMPLES = 2, 8, 6


def expected(world: World, layer: int, row: int, length: int, *, weighted: bool) -> torch.Tensor:
    """Attend in float64 to what is resident, and to samples that are not, by their weight."""
    resident, end = world.runtime.resident, length - RECENT
    q, k, v, _ = (t.double() for t in world.tensors(layer, row, 0, length))
    held = resident.positions[layer, row, :, : resident.num_resident].long()
    # Slots that a decode step filled while the request was dense have no entry.
    if world.settings.selection.dense_while_fits:
        held = torch.where(held < 0, torch.arange(held.shape[-1]), held)
    offsets, spans = sample_offsets(torch.tensor(end - SINK), SAMPLES)
    heads = []
    for head in range(HEADS):
        weight = torch.zeros(length, dtype=torch.float64)
        weight[held[head][held[head] >= 0]] = 1.0
        left_out = end - int(weight.sum())
        weight[end:] = 1.0
        free = [i for i in range(SAMPLES) if weight[SINK + int(offsets[i])] == 0.0]
        total = sum(int(spans[i]) for i in free)
        for i in free if weighted else []:
            weight[SINK + int(offsets[i])] = left_out * int(spans[i]) / total
        if weighted and free:
            assert abs(float(weight.sum()) - length) < 1e-6, "everything is counted"
        queries = q[-1, head * GROUP : (head + 1) * GROUP]
        logits = queries @ k[:, head].T * MODEL.scale + weight.log()
        heads.append(logits.softmax(-1) @ v[:, head])
    return torch.cat(heads)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", ["look_ahead", "oracle", "async_spade"])
@pytest.mark.parametrize("dense_while_fits", [True, False])
def test_a_covering_budget_is_dense_attention(policy: str, dense_while_fits: bool) -> None:
    world = World(
        make_settings(policy=policy, dense_while_fits=dense_while_fits, sample_tokens=SAMPLES)
    )
    assert world.extend([1, 2], [0, 0], [40, 5], last=True) < 1e-5
    for step in range(1, 25):
        error = world.decode([1, 2], [40 + step, 5 + step])
        assert error < 1e-5, f"step {step}: {error}, {world.errors}"
    assert not world.errors


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "selection",
    [
        {"policy": "look_ahead", "fetch_cap": 12},
        {"policy": "oracle", "fetch_cap": 2},
        {"policy": "kascade", "anchors": (0, 2), "exact_layers": (0,)},
        {"policy": "last_query"},
        {"policy": "look_ahead", "dense_while_fits": False},
    ],
)
def test_what_is_attended_to(selection: dict[str, Any]) -> None:
    """A long prompt, and a request that grows out of dense attention, in one batch."""
    settings = make_settings(
        **{"budget_tokens": 12, "resident_factor": 1.0, "fetch_cap": 4, "exact_layers": (1,)}
        | selection,
        sample_tokens=SAMPLES,
    )
    world, seen = World(settings), [0]
    is_late = selection["policy"] == "last_query"
    fits = settings.selection.num_resident + RECENT if settings.selection.dense_while_fits else 0

    def watch(layer: int, rows: list[int], lengths: list[int], out: torch.Tensor) -> None:
        if layer in settings.selection.exact_layer_ids:
            return
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length <= fits:
                continue
            weighted = not is_late or (length > fits + 1 and length > 91)
            if is_late and row == 2:
                weighted = length > fits + 1
            want = expected(world, layer, row, length, weighted=weighted)
            torch.testing.assert_close(out[i].double(), want, rtol=1e-4, atol=1e-5)
            seen[0] += 1

    world.watch = watch
    world.extend([1, 2], [0, 0], [90, 10], last=True)
    for step in range(1, 60):
        world.decode([1, 2], [90 + step, 10 + step])
        assert not world.errors
    assert seen[0] > 200
    for layer in set(range(LAYERS)) - set(settings.selection.exact_layer_ids):
        check_residents(world, layer=layer, row=1, length=149)


@pytest.mark.timeout(60)
def test_a_row_forgets_its_weights() -> None:
    settings = make_settings(
        policy="look_ahead", budget_tokens=12, resident_factor=1.0, sample_tokens=SAMPLES
    )
    world = World(settings)
    samples = world.runtime.resident.samples
    assert samples is not None
    world.extend([1], [0], [90], last=True)
    world.decode([1], [91])
    assert bool(samples.log_weight[2, 1].isfinite().any())
    world.runtime.req_to_token_pool.req_generation[1] += 1
    world.extend([1], [0], [40], last=True)
    assert bool(samples.log_weight[:, 1].isneginf().all())
    positions = torch.tensor([SINK + x for x in sample_offsets(torch.tensor(30), SAMPLES)[0]])
    keys = world.tensors(2, 1, 0, 40)[1]
    assert torch.equal(samples.k[2, 1], keys[positions])


@pytest.mark.timeout(60)
def test_late_packs_leave_weights_as_they_were() -> None:
    settings = make_settings(
        exchange={"deterministic": False, "deadline_us": 10}, policy="look_ahead",
        budget_tokens=12, resident_factor=1.0, fetch_cap=4, sample_tokens=SAMPLES,
    )  # fmt: skip
    world = World(settings, delay_s=0.004)
    world.extend([1], [0], [90], last=True)
    for step in range(1, 25):
        world.decode([1], [90 + step])
    assert not world.errors
    assert world.runtime.counters.late_packs_total > 0
    samples = world.runtime.resident.samples
    assert samples is not None
    assert bool(samples.log_weight[2, 1].isfinite().any())
    before = samples.log_weight[2, :3].clone()
    said = torch.full((2, HEADS, SAMPLES), float("nan"))
    said[1] = 0.5
    samples.weigh(2, torch.tensor([1, 2]), said)
    assert torch.equal(samples.log_weight[2, 1], before[1])
    assert bool((samples.log_weight[2, 2] == 0.5).all())


@pytest.mark.timeout(60)
def test_weights_for_a_former_request_are_dropped() -> None:
    """They were on the way when its row got another tenant."""
    settings = make_settings(
        policy="last_query", budget_tokens=12, resident_factor=1.0, sample_tokens=SAMPLES
    )
    world = World(settings)
    samples = world.runtime.resident.samples
    assert samples is not None
    world.extend([1, 2], [0, 0], [90, 80], last=True)
    world.decode([1, 2], [91, 81])  # its packs are for the next step
    assert bool(samples.log_weight[:, 1:3].isneginf().all())
    world.runtime.req_to_token_pool.req_generation[2] += 1
    world.decode([1], [92])
    assert world.runtime.counters.stale_pack_rows_total > 0
    assert bool(samples.log_weight[2, 1].isfinite().any())
    assert bool(samples.log_weight[:, 2].isneginf().all())
    assert not world.errors
