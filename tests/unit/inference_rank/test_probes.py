# SPDX-License-Identifier: Apache-2.0
"""Both probes record what was chosen and attended to; the reader puts it together."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import request_world
import torch
from request_world import CONTEXT, DIM, HEADS, MODEL, RECENT, SINK, Request, World

from tandemkv.cache_rank.engine.selection_probe import SelectionProbe, selection_file
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.inference_rank.attention.probe import AttentionProbe
from tandemkv.server.evaluation.inspect.recording import read_recording

BUDGET, LENGTH, STEPS = 24, 90, 6
_NAMED = request_world.kv_of


def positions(text: str) -> set[int]:
    raw = base64.b64decode(text)
    return {p for p in range(8 * len(raw)) if raw[p // 8] >> (p % 8) & 1}


def kv_of(tokens: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[n, H, D]`` of `tokens` ``[n]``."""
    k, v = _NAMED(tokens, layer)
    k[..., 0], v[..., 0] = k[..., 1], v[..., 1]
    return k, v


def probe_of(world: World, **options: Any) -> AttentionProbe | None:
    given: dict[str, Any] = {
        "model": MODEL,
        "settings": world.settings,
        "keys": world.pool.k,
        "resident_positions": world.backend.link.resident_positions,
        "log_weight": None if world.home.samples is None else world.home.samples.log_weight,
        "has_graphs": False,
    }
    return AttentionProbe.from_environment(**given | options)


def run_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, detail: str = "1", **selection: Any
) -> tuple[World, Path, dict[tuple[int, int], torch.Tensor]]:
    """Decode one request; returns the query ``[Hq, D]`` of each (length, layer)."""
    path = tmp_path / "probe.jsonl"
    monkeypatch.setenv("TANDEMKV_PROBE_FILE", str(path))
    monkeypatch.setenv("TANDEMKV_PROBE_DETAIL", detail)
    # Names of tokens are large numbers, and would decide every softmax.
    monkeypatch.setattr(request_world, "kv_of", kv_of)
    monkeypatch.setattr(World, "check", lambda *_: None)
    torch.manual_seed(0)
    options = {"index_dtype": "native", "exact_layers": (1,), "budget_tokens": BUDGET, **selection}
    world = World(own=False, seed=5, evaluation=True, **options)
    probe = world.backend._probe = probe_of(world)
    assert probe is not None
    queries: dict[tuple[int, int], torch.Tensor] = {}
    measure = probe.after_layer

    def after_layer(layer: int, query: torch.Tensor, table: torch.Tensor) -> None:
        queries[world.running[0].length, layer] = query[0].clone()
        measure(layer, query, table)

    monkeypatch.setattr(probe, "after_layer", after_layer)
    world.random.seed(0)
    request = Request(1000 + torch.arange(CONTEXT), LENGTH, CONTEXT)
    world.waiting.append(request)
    world.admit()
    while request.length < LENGTH + STEPS:
        assert world.running == [request]
        world.decode()
    return world, path, queries


def weights_of(query: torch.Tensor, layer: int, start: int, end: int) -> torch.Tensor:
    """Share of the softmax mass ``[H, end - start]`` of each of these tokens, in float64."""
    k, _ = kv_of(1000 + torch.arange(start, end), layer)
    groups = query.double().view(HEADS, -1, DIM)
    logits = torch.einsum("hgd,nhd->hgn", groups, k.double()) * MODEL.scale
    return logits.softmax(-1).mean(1)


@pytest.mark.parametrize("policy", ["oracle", "last_query"])
def test_chosen_and_attended_tokens_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    world, path, queries = run_one(tmp_path, monkeypatch, policy=policy, sample_tokens=0)
    found = read_recording(path, selection_file(path))
    assert found.lengths == list(range(LENGTH + 1, LENGTH + STEPS + 1))
    assert found.layers == [0, 2, 3]  # layer 1 is exact
    assert found.num_heads == HEADS
    lag = int(policy == "last_query")
    for step, length in enumerate(found.lengths):
        latest = set(range(length - RECENT, length))
        for place, layer in enumerate(found.layers):
            weights = weights_of(queries[length, layer], layer, 0, length)
            hi = length + lag - RECENT
            candidates = weights_of(queries[length, layer], layer, SINK, hi)
            chosen = found.selected[step][place]
            assert chosen is not None
            for head in range(HEADS):
                attended = positions(found.attended[step][place][head])
                assert latest | set(range(SINK)) <= attended
                assert len(attended) == world.num_resident + RECENT
                mass = float(weights[head, sorted(attended)].sum())
                assert found.mass[step][place][head] == pytest.approx(mass, rel=1e-6)
                best = weights[head].topk(len(attended)).values.sum()
                assert found.oracle_mass[step][place][head] == pytest.approx(float(best), rel=1e-6)
                true = candidates[head].topk(BUDGET).indices + SINK
                assert positions(chosen[head]) == set(true.tolist())
                if not lag:
                    assert set(true.tolist()[: world.selection.fetch_cap_tokens]) <= attended


def test_samples_that_count_are_attended_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, path, _ = run_one(tmp_path, monkeypatch, policy="oracle", sample_tokens=8)
    found = read_recording(path, selection_file(path))
    samples = world.home.samples
    assert samples is not None
    row = world.running[0].row
    for place, layer in enumerate(found.layers):
        for head in range(HEADS):
            counted = int((samples.log_weight[layer, row, head] > float("-inf")).sum())
            attended = positions(found.attended[-1][place][head])
            assert len(attended) == world.num_resident + RECENT + counted


def test_what_keeps_the_sink_alone_is_measured_without_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path, _ = run_one(tmp_path, monkeypatch, policy="streaming", exact_layers=())
    found = read_recording(path, selection_file(path))
    expected = {*range(SINK), *range(LENGTH + STEPS - RECENT, LENGTH + STEPS)}
    assert all(positions(x) == expected for layer in found.attended[-1] for x in layer)
    assert all(chosen is None for step in found.selected for chosen in step)


def test_every_eighth_step_without_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, path, _ = run_one(tmp_path, monkeypatch, policy="oracle", detail="0")
    assert not path.exists()
    while not path.exists():
        world.decode()
    assert world.runtime.counters.decode_steps_total == 8
    assert "attended_bits" not in path.read_text()
    assert not selection_file(path).exists()


def test_graphs_cannot_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(own=False, seed=5, evaluation=True)
    assert probe_of(world) is None
    monkeypatch.setenv("TANDEMKV_PROBE_FILE", str(tmp_path / "probe.jsonl"))
    with pytest.raises(SettingsError, match="--disable-cuda-graph"):
        probe_of(world, has_graphs=True)


@pytest.mark.parametrize(("evaluation", "detail"), [(False, "1"), (True, "0")])
def test_selections_are_not_recorded_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluation: bool, detail: str
) -> None:
    monkeypatch.setenv("TANDEMKV_PROBE_FILE", str(tmp_path / "probe.jsonl"))
    monkeypatch.setenv("TANDEMKV_PROBE_DETAIL", detail)
    settings = RankSettings.model_validate({"evaluation": evaluation})
    assert SelectionProbe.from_settings(settings) is None
