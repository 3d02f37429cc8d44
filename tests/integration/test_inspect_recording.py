# SPDX-License-Identifier: Apache-2.0
"""Both ranks' probes record what was chosen and attended to; the reader puts it together."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import torch
import two_ranks

from tandemkv.cache_rank.selection_probe import selection_file
from tandemkv.inference_rank.attention_probe import AttentionProbe
from tandemkv.server.evaluation.inspect.recording import read_recording


def positions(text: str) -> set[int]:
    raw = base64.b64decode(text)
    return {p for p in range(8 * len(raw)) if raw[p // 8] >> (p % 8) & 1}


@pytest.mark.timeout(60)
def test_chosen_and_attended_tokens_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_file = tmp_path / "probe.jsonl"
    monkeypatch.setenv("TANDEMKV_PROBE_FILE", str(probe_file))
    monkeypatch.setenv("TANDEMKV_PROBE_DETAIL", "1")
    settings = two_ranks.make_settings(
        policy="oracle", budget_tokens=12, resident_factor=1.0, fetch_cap=4
    ).model_copy(update={"evaluation": True})
    world = two_ranks.World(settings)
    probe = AttentionProbe.from_settings(world.runtime)
    assert probe is not None

    def watched(step_class: type) -> None:
        attend = step_class.attend

        def both(step, layer, q, k, v):  # type: ignore[no-untyped-def]
            out = attend(step, layer, q, k, v)
            probe.after_layer(layer, step, q, k)
            return out

        monkeypatch.setattr(step_class, "attend", both)

    watched(two_ranks.ExtendStep)
    watched(two_ranks.DecodeStep)
    world.extend([1], [0], [90], last=True)
    for step in range(1, 7):
        world.decode([1], [90 + step])
    assert not world.errors
    found = read_recording(probe_file, selection_file(probe_file))
    assert found.lengths == list(range(91, 97))
    assert found.layers == [0, 2, 3]  # layer 1 is exact
    assert found.num_heads == two_ranks.HEADS
    resident = world.runtime.resident
    for i, layer in enumerate(found.layers):
        for head in range(found.num_heads):
            held = resident.positions[layer, 1, head, : resident.num_resident].tolist()
            assert positions(found.attended[-1][i][head]) == {*held, *range(88, 96)}
            # What the true query chooses among the candidates, in float64.
            q, k, _, _ = (t.double() for t in world.tensors(layer, 1, 0, 96))
            group = q[95].view(two_ranks.HEADS, two_ranks.GROUP, -1)[head]
            logits = group @ k[2:88, head].T * two_ranks.MODEL.scale
            best = logits.softmax(-1).mean(0).topk(12).indices + 2
            chosen = found.selected[-1][i]
            assert chosen is not None
            assert positions(chosen[head]) == set(best.tolist())
            weights = torch.softmax(group @ k[:, head].T * two_ranks.MODEL.scale, -1).mean(0)
            mass = weights[[*held, *range(88, 96)]].sum()
            assert found.mass[-1][i][head] == pytest.approx(float(mass), rel=1e-6)


@pytest.mark.parametrize(("evaluation", "detail"), [(False, "1"), (True, "0")])
def test_nothing_is_recorded_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluation: bool, detail: str
) -> None:
    monkeypatch.setenv("TANDEMKV_PROBE_FILE", str(tmp_path / "probe.jsonl"))
    monkeypatch.setenv("TANDEMKV_PROBE_DETAIL", detail)
    settings = two_ranks.make_settings(policy="oracle").model_copy(
        update={"evaluation": evaluation}
    )
    world = two_ranks.World(settings)
    assert world.session._epoch.selection_probe is None
