# SPDX-License-Identifier: Apache-2.0
"""What a plan concludes from measured times."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemkv.cache_rank.protocol.declared import DeclaredPolicy
from tandemkv.cache_rank.protocol.engine import SelectionTime
from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings import RankSettings, SelectionSettings
from tandemkv.inference_rank.start import measurement as start_measurement
from tandemkv.inference_rank.start.layer_time import LayerTime, measure_layer
from tandemkv.inference_rank.start.measurement import StartMeasurement
from tandemkv.inference_rank.start.plan import MOST_REFRESH, StartPlan, make_plan

CPU, CUDA1 = torch.device("cpu"), torch.device("cuda", 1)
GRAPH = LayerTime(weights_us=150.0, attention_us=50.0, of_graph=True)


def plan(
    scan_us: float,
    timing: Timing = Timing.NEXT_STEP,
    *,
    layer: LayerTime = GRAPH,
    has_own_gpu: bool = True,
    **selection: object,
) -> StartPlan:
    """Plan with a layer of 200 us, and a transfer of 10 us."""
    return make_plan(
        SelectionSettings.model_validate({"policy": "async_spade", **selection}),
        timing,
        measured=SelectionTime(scan_us=scan_us, transfer_us=10.0, batch=8, context=65536),
        layer=layer,
        has_own_gpu=has_own_gpu,
        is_cuda=True,
        dense_tokens=4096,
    )


@pytest.mark.parametrize(
    ("scan_us", "refresh", "exposed", "hidden"),
    [
        (100.0, 1, 0.0, True),
        (200.0, 1, 10.0, True),  # 5 % is tolerated
        (201.0, 2, 5.5, True),
        (215.0, 3, 25.0 / 3, True),
        (225.0, 4, 35.0 / 4, True),
        (490.0, MOST_REFRESH, 75.0, False),
    ],
)
def test_least_refresh_that_hides(
    scan_us: float, refresh: int, exposed: float, hidden: bool
) -> None:
    found = plan(scan_us)
    assert found.refresh_every == refresh
    assert found.exposed_us == pytest.approx(exposed)
    assert found.is_hidden is hidden
    assert found.chosen is (refresh > 1)
    assert ("--refresh-every 1" in found.note) is (refresh > 1)
    assert found.values()["plan_refresh_steps"] == refresh


@pytest.mark.parametrize(
    "options",
    [
        {"refresh_every": 1},
        {"timing": Timing.SAME_STEP_HIDDEN, "policy": "look_ahead"},
        {"timing": Timing.SAME_STEP_QUERY, "policy": "oracle"},
        {"has_own_gpu": False},
        {"dense_while_fits": False},
        {"layer": LayerTime(weights_us=150.0, attention_us=50.0)},  # a lower bound only
        {"layer": LayerTime(weights_us=None, attention_us=50.0)},
    ],
    ids=str,
)
def test_nothing_is_raised_where_it_may_not_be(options: dict[str, Any]) -> None:
    found = plan(490.0, **options)
    assert found.refresh_every == 1
    assert not found.chosen


def test_what_is_asked_for_stays() -> None:
    found = plan(490.0, refresh_every=7)
    assert (found.refresh_every, found.chosen) == (7, False)
    assert found.exposed_us == pytest.approx(300 / 7)


@pytest.mark.parametrize(
    ("timing", "options", "exposed"),
    [
        (Timing.SAME_STEP_HIDDEN, {"declared": DeclaredPolicy(layers_ahead=1)}, 50.0),
        (Timing.SAME_STEP_HIDDEN, {"declared": DeclaredPolicy(layers_ahead=3)}, 50.0),
        (Timing.SAME_STEP_HIDDEN, {"declared": DeclaredPolicy(layers_ahead=0)}, 250.0),
        (Timing.SAME_STEP_QUERY, {}, 250.0),
        (Timing.SAME_STEP_HIDDEN, {"has_own_gpu": False}, 250.0),
    ],
)
def test_exposure_within_the_step(timing: Timing, options: dict[str, Any], exposed: float) -> None:
    assert plan(240.0, timing, **options).exposed_us == pytest.approx(exposed)


def test_unknown_times_are_left_out() -> None:
    found = make_plan(
        SelectionSettings(), Timing.SAME_STEP_HIDDEN, measured=None, layer=None,
        has_own_gpu=False, is_cuda=False, dense_tokens=7, reason="nothing is selected",
    )  # fmt: skip
    assert set(found.values()) == {"plan_refresh_steps", "plan_dense_tokens"}
    assert found.is_hidden is None
    assert "nothing is selected" in found.text()
    small = make_plan(
        SelectionSettings(dense_batch_tokens=9), Timing.SAME_STEP_HIDDEN, measured=None, layer=None,
        has_own_gpu=False, is_cuda=False, dense_tokens=7,
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
            "needs_hidden": False,
            "selects_for_next_step": True,
            "refresh_every": 1,
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


@pytest.mark.parametrize(
    ("timing", "has_own_gpu", "exposed"),
    [
        (Timing.NEXT_STEP, True, 0.0),  # a quarter of 200, and of 20 the rest, fit behind 100
        (Timing.NEXT_STEP, False, 0.25 * 200 + 0.75 * 20),
        (Timing.SAME_STEP_HIDDEN, True, 0.25 * 100),  # each anchor has one layer
        (Timing.SAME_STEP_QUERY, True, 0.25 * 200),
    ],
)
def test_layers_that_follow_an_anchor(timing: Timing, has_own_gpu: bool, exposed: float) -> None:
    plan = make_plan(
        SelectionSettings(),
        timing,
        measured=SelectionTime(scan_us=180.0, transfer_us=20.0, batch=8, context=65536),
        layer=LayerTime(weights_us=60.0, attention_us=40.0, of_graph=True),
        has_own_gpu=has_own_gpu,
        is_cuda=True,
        dense_tokens=0,
        scanned=0.25,
    )
    assert plan.exposed_us == pytest.approx(exposed)
    assert plan.refresh_every == 1


def test_the_captured_step_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake timers: the plan before the capture raises nothing, the one after it does."""
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
        settings, MODEL, rank, device=CPU, cache_device=CUDA1,
        agree=lambda figures: [x + 2.0 for x in figures],
    )  # fmt: skip
    predicted: list[int] = []
    own.measure(
        fake_runner(), lambda layer, h, _: predicted.append(layer) or h, num_slots=64, max_batch=3
    )
    asked["predict_query"](0, torch.zeros(1), torch.zeros(1))
    assert predicted == [1]  # the first sparse layer, not layer 0
    assert rank.program.refresh_every == own.plan.refresh_every == 1
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
    # 232 + 12 us beside 182 + 22: 40 us too long, 5 % of 204 us are 10.2.
    assert rank.program.refresh_every == own.plan.refresh_every == 4
    assert own.plan.exposed_us == pytest.approx(10.0)


def test_without_memory_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(start_measurement, "measure_selection", fails)
    own = StartMeasurement(
        RankSettings(), MODEL, fake_rank(), device=CPU, cache_device=CPU, agree=list
    )
    own.measure(fake_runner(), lambda _, h, __: h, num_slots=64, max_batch=3)
    assert own.plan.selection is None
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
