# SPDX-License-Identifier: Apache-2.0
"""What a plan concludes from measured times."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.policies.registry import resolve_selection
from tandemkv.cache_rank.protocol.engine import SelectionTime
from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    RankSettings,
    SelectionSettings,
)
from tandemkv.inference_rank.start import measurement as start_measurement
from tandemkv.inference_rank.start.layer_time import LayerTime, measure_layer
from tandemkv.inference_rank.start.measurement import StartMeasurement
from tandemkv.inference_rank.start.plan import StartPlan

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("layer_us", "refresh", "exposed", "hidden"),
    [(200.0, None, 40.0, False), (200.0, 4, 10.0, True), (200.0, 5, 8.0, True)],
)
def test_a_selection_takes_its_time_from_the_model(
    layer_us: float, refresh: int | None, exposed: float, hidden: bool
) -> None:
    """On average over the steps of a refresh; 5 % of a layer count as hidden."""
    found = StartPlan(
        settings=SelectionSettings(refresh_every=refresh),
        measured=SelectionTime(scan_us=30.0, transfer_us=10.0, batch=8, context=65536),
        layer=LayerTime(weights_us=layer_us - 50.0, attention_us=50.0, of_graph=True),
        is_cuda=True,
        dense_tokens=4096,
    )
    assert found.exposed_us == pytest.approx(exposed)
    assert found.is_hidden is hidden
    assert found.values()["plan_refresh_steps"] == (refresh or 1)
    assert found.info()["plan_placement"] == "the model's GPU"


@pytest.mark.parametrize(
    ("policy", "options", "steps", "exposed"),
    [
        ("sync_kv", {"stride": 8}, 8, 5.0),
        ("sfi", {"max_interval": 32}, 32, 40.0),  # sentences may end in every step
    ],
)
def test_policies_with_slow_steps_have_an_interval_of_their_own(
    policy: str, options: dict[str, int], steps: int, exposed: float
) -> None:
    found = StartPlan(
        settings=resolve_selection({"policy": policy, "options": options}),
        measured=SelectionTime(scan_us=30.0, transfer_us=10.0, batch=8, context=65536),
        layer=LayerTime(weights_us=50.0, attention_us=50.0, of_graph=True),
        is_cuda=True,
        dense_tokens=4096,
    )
    assert found.values()["plan_refresh_steps"] == steps
    assert found.exposed_us == pytest.approx(exposed)


def test_of_a_layer_that_was_not_measured_nothing_is_said() -> None:
    found = StartPlan(
        settings=SelectionSettings(),
        measured=SelectionTime(scan_us=30.0, transfer_us=10.0, batch=8, context=65536),
        layer=LayerTime(weights_us=None, attention_us=50.0),
        is_cuda=False,
        dense_tokens=4096,
    )
    assert found.exposed_us is found.is_hidden is None
    assert found.values()["plan_scan_us"] == 30.0


def test_unknown_times_are_left_out() -> None:
    found = StartPlan(
        settings=SelectionSettings(), measured=None, layer=None, is_cuda=False, dense_tokens=7,
        note="nothing is selected",
    )  # fmt: skip
    assert set(found.values()) == {"plan_refresh_steps", "plan_dense_tokens"}
    assert found.is_hidden is None
    assert "nothing is selected" in found.text()
    small = StartPlan(
        settings=SelectionSettings(dense_batch_tokens=9), measured=None, layer=None, is_cuda=False,
        dense_tokens=7,
    )  # fmt: skip
    assert small.values()["plan_dense_batch_tokens"] == 9


MODEL = ModelSpec(
    architecture="LlamaForCausalLM", num_layers=2, num_qo_heads=4, num_kv_heads=2, head_dim=8,
    hidden_size=32, max_context=512, dtype="float32", model_hash="0",
)  # fmt: skip


def fake_rank(**traits: object) -> Any:
    program = SimpleNamespace(
        **{
            "selects": True,
            "scanned_share": 1.0,
            "is_sparse_layer": bool,
            **traits,
        }
    )
    return SimpleNamespace(program=program)


def fake_runner() -> Any:
    layers = [torch.nn.Linear(32, 32) for _ in range(2)]
    return SimpleNamespace(
        page_size=1,
        model_config=SimpleNamespace(model_path="/nowhere"),
        model=SimpleNamespace(model=SimpleNamespace(layers=layers)),
    )


def test_layers_that_follow_an_anchor_cost_the_transfer_alone() -> None:
    plan = StartPlan(
        settings=SelectionSettings(),
        measured=SelectionTime(scan_us=180.0, transfer_us=20.0, batch=8, context=65536),
        layer=LayerTime(weights_us=60.0, attention_us=40.0, of_graph=True),
        is_cuda=True,
        dense_tokens=0,
        scanned=0.25,
    )
    assert plan.exposed_us == pytest.approx(0.25 * 200 + 0.75 * 20)


def test_a_layer_is_timed_again_in_the_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake timers."""
    times = SelectionTime(scan_us=230.0, transfer_us=10.0, batch=3, context=300)
    asked: dict[str, Any] = {}

    def measured(**arguments: Any) -> SelectionTime:
        asked.update(arguments)
        return times

    monkeypatch.setattr(start_measurement, "measure_selection", measured)
    lower = LayerTime(weights_us=90.0, attention_us=20.0)
    monkeypatch.setattr(start_measurement, "measure_layer", lambda *_, **__: lower)
    monkeypatch.setattr(
        start_measurement, "measure_replay", lambda replay, _: replay() or 2 * 180.0
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    rank, settings = fake_rank(), RankSettings.model_validate({})
    own = StartMeasurement(
        settings, MODEL, rank, device=CPU, agree=lambda figures: [x + 2.0 for x in figures],
    )  # fmt: skip
    predicted: list[int] = []
    own.measure(
        fake_runner(), lambda layer, h, _: predicted.append(layer) or h, num_slots=64, max_batch=3
    )
    asked["predict_query"](0, torch.zeros(1), torch.zeros(1))
    assert predicted == [1]  # the first sparse layer, not layer 0
    assert own.plan.values()["plan_layer_us"] == 92.0 + 22.0  # the slowest rank's
    replayed: list[Any] = []
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import (
        FullCudaGraphBackend,
    )

    backend = FullCudaGraphBackend.__new__(FullCudaGraphBackend)
    monkeypatch.setattr(FullCudaGraphBackend, "replay_session", lambda _: nullcontext())
    monkeypatch.setattr(
        FullCudaGraphBackend, "replay", lambda _self, key, _batch: replayed.append(key)
    )
    graphs = SimpleNamespace(
        backend=backend,
        capture_bs=[8, 1, 4, 2],
        attn_backend=SimpleNamespace(kinds=(DecodeKind.SELECTING, DecodeKind.INDEXING)),
        _make_graph_key=lambda *key: key,
    )
    own.after_capture(graphs)
    own.after_capture(graphs)  # a later capture is left alone
    assert replayed == [(4, None, "tandemkv-indexing")]
    assert own.plan.values()["plan_layer_us"] == 182.0 + 22.0
    assert own.plan.exposed_us == pytest.approx(232.0 + 12.0)


def test_without_memory_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(start_measurement, "measure_selection", fails)
    own = StartMeasurement(RankSettings(), MODEL, fake_rank(), device=CPU, agree=list)
    own.measure(fake_runner(), lambda _, h, __: h, num_slots=64, max_batch=3)
    assert own.plan.measured is None
    assert "no memory" in own.plan.note


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_timed_as_it_is(dtype: torch.dtype) -> None:
    """Matrices of another type are not pretended to be measured."""
    layer = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 32)).to(dtype)
    pool = torch.randn(64, 2, 8)
    found = measure_layer(layer, pool, pool, model=MODEL, batch=3, attended=40)
    assert found.attention_us > 0
    assert (found.weights_us is None) is (dtype != torch.float32)
    assert (found.us is None) is (found.weights_us is None)
