# SPDX-License-Identifier: Apache-2.0
"""Timing a selection before anything is served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tandemkv.cache_rank.engine import measure as measure_module
from tandemkv.cache_rank.engine.cache_engine import CacheEngine
from tandemkv.cache_rank.engine.measure import largest_load, prompt_lengths
from tandemkv.cache_rank.policies.base import Selection, SelectionInput
from tandemkv.cache_rank.policies.quest import QuestPolicy
from tandemkv.cache_rank.policies.registry import selection_values
from tandemkv.cache_rank.policies.sfi import SFIPolicy
from tandemkv.cache_rank.protocol.engine import measure_selection
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.kernels.exchange import exchange_rows

HEADS, QUERY_HEADS, DIM, CONTEXT = 2, 4, 16, 256
CPU = torch.device("cpu")
MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=3,
    num_qo_heads=QUERY_HEADS,
    num_kv_heads=HEADS,
    head_dim=DIM,
    hidden_size=QUERY_HEADS * DIM,
    max_context=CONTEXT,
    dtype="float32",
    model_hash="0",
)


def settings_of(*, two_gpus: bool = False, **selection: object) -> RankSettings:
    """Make settings of a resident set of 52 slots, in the pool or on another GPU."""
    chosen = {
        "budget_tokens": 32,
        "resident_factor": 1.5,
        "num_recent_tokens": 16,
        "fetch_cap": 8,
        "exact_layers": (0,),
        **selection,
    }
    return RankSettings.model_validate(
        {"selection": selection_values(chosen), "placement": {"two_gpus": two_gpus}}
    )


@pytest.mark.parametrize(
    ("num_slots", "max_batch", "max_context", "num_cold", "expected"),
    [
        (65536, 8, 131072, 4096, (8, 8192)),
        (65536, 8, 4096, 2048, (8, 4096)),  # no request is longer
        (65536, 64, 131072, 4096, (15, 4097)),  # 64 would be dense
        (65536, 8, 4096, 4096, None),  # even the longest is
        (1000, 4, 8192, 4096, None),  # none fits
    ],
)
def test_largest_load(
    num_slots: int, max_batch: int, max_context: int, num_cold: int,
    expected: tuple[int, int] | None,
) -> None:  # fmt: skip
    found = largest_load(
        num_slots=num_slots, max_batch=max_batch, max_context=max_context, num_cold=num_cold
    )
    assert found == expected


@pytest.mark.parametrize(
    ("shortest", "longest", "expected"),
    [
        (100, 450, [100, 200, 400, 450]),
        (100, 400, [100, 200, 400]),
        (100, 100, [100]),
        (100, 60, [60]),
    ],
)
def test_prompts_of_each_power_of_two_are_seeded(
    shortest: int, longest: int, expected: list[int]
) -> None:
    assert prompt_lengths(shortest, longest) == expected


@pytest.mark.parametrize("policy", ["look_ahead", "last_query", "sfi", "streaming"])
@pytest.mark.parametrize(("index_dtype", "page_size"), [("native", 1), ("int8", 1), ("int4", 16)])
def test_selection_is_timed(
    policy: str, index_dtype: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one rank's own code, at the load that was asked for; in pieces if that is too much."""
    late = {"late_layers": 1, "exact_layers": ()} if policy == "look_ahead" else {}
    settings = settings_of(policy=policy, index_dtype=index_dtype, **late)
    sets: list[torch.Tensor] = []
    hidden_shapes = []

    def predict(_layer: int, hidden: torch.Tensor, _positions: torch.Tensor) -> torch.Tensor:
        hidden_shapes.append(tuple(hidden.shape))
        return hidden.view(-1, QUERY_HEADS, DIM)

    seeded: list[int] = []

    def note_seed(rank: CacheEngine, *args: Any) -> None:
        seed(rank, *args)
        sets[:] = rank._resident[0]
        seeded.append(len(args[3]))

    seed = CacheEngine.seed
    monkeypatch.setattr(CacheEngine, "seed", note_seed)
    monkeypatch.setattr(measure_module, "_MOST_TOKENS", {"cpu": 3 * CONTEXT})
    found = measure_selection(
        model=MODEL, settings=settings, num_slots=4 * CONTEXT, page_size=page_size,
        max_batch=4, device=CPU, predict_query=predict,
    )  # fmt: skip
    if policy == "streaming":
        assert found is None
        return
    assert found is not None
    assert (found.batch, found.context) == (4, CONTEXT)
    assert seeded == [min(64, n) for n in prompt_lengths(4 + 48 + 16 + 1, CONTEXT)]
    assert found.transfer_us > 0
    assert found.scan_us >= 0
    assert sets[0].shape == (
        4,
        settings.selection.num_resident,
        HEADS,
        DIM,
    )  # three of the four, and padding
    assert sets[0][0].eq(0).all()
    assert sets[0][1:].ne(0).any()  # rows were copied there, and nowhere else
    assert set(hidden_shapes) == ({(3, QUERY_HEADS * DIM)} if policy == "look_ahead" else set())


@pytest.mark.parametrize("policy", ["last_query", "sfi"])
def test_a_gpu_captures_what_is_timed_if_it_may(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the others the methods of the policy are called, and what they take is loaded."""
    captured: list[bool] = []

    def median(run: Callable[[], None], _: torch.device, **more: Any) -> float:
        captured.append(more.get("is_captured", True))
        more.get("prepare", lambda: None)()
        run()
        return 1.0

    selected: list[int] = []

    def select(policy: SFIPolicy, request: SelectionInput) -> Selection:
        selected.append(len(request.rows))
        return choose(policy, request)

    choose = SFIPolicy.select
    monkeypatch.setattr(SFIPolicy, "select", select)
    monkeypatch.setattr(measure_module, "median_us", median)
    found = measure_selection(
        model=MODEL, settings=settings_of(policy=policy), num_slots=4 * CONTEXT, page_size=16,
        max_batch=2, device=CPU,
        predict_query=lambda *_: pytest.fail("it has its query"),
    )  # fmt: skip
    assert found is not None
    assert captured == [policy != "sfi", True], "the selection, and the copies of rows"
    assert selected == ([2] if policy == "sfi" else [])


@pytest.mark.parametrize("others", [{"windowed_layers": (0,)}, {"linear_layers": (0, 1)}])
def test_the_layer_that_is_measured_is_one_that_selects(others: dict[str, Any]) -> None:
    """Whatever the first layers of the model are, it may be an anchor."""
    found = measure_selection(
        model=msgspec.structs.replace(MODEL, **others), settings=settings_of(policy="kascade"),
        num_slots=2 * CONTEXT, page_size=16, max_batch=2, device=CPU,
        predict_query=lambda _layer, hidden, _positions: hidden.view(-1, QUERY_HEADS, DIM),
    )  # fmt: skip
    assert found is not None


@pytest.mark.parametrize("two_gpus", [False, True])
def test_weights_of_samples_go_the_same_way_as_in_a_step(
    two_gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two GPUs the copy that is timed by itself carries them."""
    calls: list[dict[str, Any]] = []

    def exchange(*found: torch.Tensor, **more: Any) -> None:
        calls.append(more)
        exchange_rows(*found, **more)

    monkeypatch.setattr(measure_module, "exchange_rows", exchange)
    found = measure_selection(
        model=MODEL, settings=settings_of(two_gpus=two_gpus, sample_tokens=8),
        num_slots=2 * CONTEXT, page_size=16, max_batch=2, device=CPU,
        predict_query=lambda _layer, hidden, _positions: hidden.view(-1, QUERY_HEADS, DIM),
    )  # fmt: skip
    assert found is not None
    for call in calls:
        weights = call["weights"]
        assert (weights is not None) is two_gpus
        if weights is not None:
            assert weights.active.all()
            assert weights.target[1:].isfinite().any(-1).all()
            assert torch.equal(weights.target[1:], weights.source[1:])


@pytest.mark.parametrize("most_bytes", [1 << 10, 512 << 20])
def test_bounds_of_pages_are_those_of_the_requests_that_are_timed(
    most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a request is longer than the keys that a measurement takes otherwise."""
    chosen: list[torch.Tensor] = []
    select = QuestPolicy.select

    def note(policy: QuestPolicy, request: SelectionInput) -> Selection:
        chosen.append(select(policy, request).positions)
        return Selection(chosen[-1])

    monkeypatch.setattr(QuestPolicy, "select", note)
    monkeypatch.setattr(measure_module, "_MOST_BYTES", most_bytes)
    found = measure_selection(
        model=MODEL, settings=settings_of(policy="quest"), num_slots=4 * CONTEXT, page_size=16,
        max_batch=3, device=CPU,
        predict_query=lambda *_: pytest.fail("nothing is predicted"),
    )  # fmt: skip
    assert found is not None
    assert found.context == CONTEXT
    assert bool((chosen[-1] >= 0).all())
    assert len(torch.stack(chosen)[..., 0].unique()) > 1


def test_windows_are_timed_too(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": QUERY_HEADS * DIM,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = measure_selection(
        model=MODEL, settings=settings_of(policy="async_spade"), num_slots=2 * CONTEXT,
        page_size=16, max_batch=2,
        device=CPU,
        predict_query=lambda *_: pytest.fail("predicts from its window"), model_dir=tmp_path,
    )  # fmt: skip
    assert found is not None
    assert found.total_us > 0
