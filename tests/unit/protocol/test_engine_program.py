# SPDX-License-Identifier: Apache-2.0
"""Both ranks derive what a step does; these hold for every model, policy and setting."""

from __future__ import annotations

from typing import Any, Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemkv.cache_rank.protocol.engine_program import DecodeKind, EngineProgram
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.messages import PolicyTraits, RefreshRule, Timing
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.declared import DeclaredPolicy
from tandemkv.cache_rank.protocol.settings.placement import Link, Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    RankSettings,
    SelectionSettings,
)

IndexDtype = Literal["native", "int8", "int4"]
INDEX_DTYPES: tuple[IndexDtype, ...] = get_args(IndexDtype)


def program_of(
    *,
    num_layers: int = 6,
    timing: Timing = Timing.SAME_STEP_HIDDEN,
    exact_layers: tuple[int, ...] = (0,),
    look_ahead: int = 1,
    late_layers: int = 0,
    sources: tuple[int, ...] = (),
    slow_heads: tuple[tuple[int, ...], ...] = (),
    index_dtype: IndexDtype = "native",
    index: Literal["keys", "page_bounds"] = "keys",
    keeps_queries: bool = False,
    all_exact: bool = False,
    windowed: tuple[int, ...] = (),
    linear: tuple[int, ...] = (),
    placement: Placement | None = None,
) -> EngineProgram:
    model = ModelSpec(
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        num_qo_heads=6,
        num_kv_heads=2,
        head_dim=8,
        hidden_size=48,
        max_context=4096,
        dtype="bfloat16",
        model_hash="0",
        windowed_layers=tuple(x for x in windowed if x < num_layers),
        linear_layers=linear,
    )
    rule = RefreshRule.PERIOD if timing is Timing.EXACT_STEP else RefreshRule.NEVER
    selection = SelectionSettings(
        budget_tokens=128,
        exact_layers=tuple(x for x in exact_layers if x < num_layers),
        declared=DeclaredPolicy(
            timing=timing,
            all_exact=all_exact,
            refresh=rule,
            wants_query_window=keeps_queries,
            index=index,
            layers_ahead=look_ahead,
        ),
        sample_tokens=0,
        late_layers=late_layers,
        index_dtype=index_dtype,
    )
    return EngineProgram(
        model,
        RankSettings(selection=selection, placement=placement or Placement()),
        PolicyTraits(layer_sources=sources, slow_heads=slow_heads),
        page_size=16,
    )


@st.composite
def programs(draw: st.DrawFn) -> EngineProgram:
    num_layers = draw(st.integers(1, 9))
    anchors = draw(st.sets(st.integers(0, num_layers - 1))) | {0}
    shares = draw(st.booleans())
    sources = tuple(max(a for a in anchors if a <= x) for x in range(num_layers))
    return program_of(
        num_layers=num_layers,
        timing=draw(st.sampled_from(Timing)),
        exact_layers=tuple(draw(st.sets(st.integers(0, num_layers - 1)))),
        look_ahead=draw(st.integers(0, 3)),
        sources=sources if shares else (),
        index_dtype=draw(st.sampled_from(INDEX_DTYPES)),
        keeps_queries=draw(st.booleans()),
        windowed=() if shares else tuple(draw(st.sets(st.integers(0, num_layers - 1)))),
    )


@given(programs())
@settings(max_examples=300)
def test_each_selecting_layer_is_fetched_for_once_by_its_source(program: EngineProgram) -> None:
    fetched = [x for source in program.sources for x in program.fetched_by(source)]
    assert sorted(fetched) == program.selecting
    for source in program.sources:
        assert program.source_of(source) == source
        assert list(program.fetched_by(source)) == sorted(program.fetched_by(source))
        assert all(program.source_of(x) == source for x in program.fetched_by(source))
    assert [program.book_of(x) for x in program.selecting] == list(range(len(program.selecting)))
    others = set(range(program.num_layers)) - set(program.selecting)
    assert all(program.book_of(x) is None for x in others)


@given(programs())
@settings(max_examples=300)
def test_streams_reach_each_layer_that_is_predicted_for_before_it_attends(
    program: EngineProgram,
) -> None:
    targets = [(x, t) for x in range(program.num_layers) for t in program.targets_of(x)]
    assert all(entry <= target for entry, target in targets)
    assert [t for _, t in targets] == [x for x in program.sources if x not in program.late_layers]
    assert program.last_entry == max((entry for entry, _ in targets), default=-1)
    for entry, _ in targets:
        assert program.reads_stream(entry) == program.needs_hidden


@pytest.mark.parametrize("kind", ["windowed", "linear"])
def test_other_layers_are_left_to_sglang(kind: str) -> None:
    others: dict[str, Any] = {kind: (0, 2, 4), "placement": Placement(link="local")}
    program = program_of(**others, exact_layers=())
    assert program.selecting == program.sources == [1, 3, 5]
    assert [program.is_sparse_layer(x) for x in range(6)] == [False, True] * 3
    # Each from the stream of the layer before, which is another one.
    assert [program.targets_of(x) for x in range(6)] == [(1,), (), (3,), (), (5,), ()]
    assert program_of(**others, all_exact=True).selecting == [1, 3, 5]


def test_late_layers_are_those_without_a_window() -> None:
    assert program_of(windowed=(0,), exact_layers=(), late_layers=2).late_layers == (1,)
    with pytest.raises(SettingsError, match=r"late_layers=2: too many.*at most 1"):
        program_of(windowed=(3, 4, 5), exact_layers=(), late_layers=2)


def test_windows_do_not_reach_another_gpu() -> None:
    far = Placement(model_device="cuda", two_gpus=True)
    with pytest.raises(SettingsError, match=r"sliding window.*--cache-ranks 0"):
        program_of(windowed=(0,), placement=far)
    program_of(placement=far)


@pytest.mark.parametrize("link", ["shared", "message"])
def test_states_cannot_be_taken_back_if_a_cache_rank_is_lost(link: Link) -> None:
    reason = rf"linear attention.*passes are done again.*transport={link}.*--cache-ranks 0"
    with pytest.raises(SettingsError, match=reason):
        program_of(linear=(0,), placement=Placement(link=link))
    program_of(linear=(0,), placement=Placement(link="local"))


@given(programs(), st.sampled_from(DecodeKind))
@settings(max_examples=300)
def test_what_a_layer_awaits_is_asked_for_before(program: EngineProgram, kind: DecodeKind) -> None:
    for layer in range(program.num_layers):
        source = program.source_of(layer)
        if program.awaits(kind, layer):
            assert kind is DecodeKind.SELECTING
            assert program.is_sparse_layer(layer)
            by_stream = any(source in program.targets_of(x) for x in range(layer + 1))
            by_query = program.hands_over_query(kind, source) and source <= layer
            assert by_stream or by_query
        if program.hands_over_later(kind, layer):
            assert program.is_sparse_layer(layer)
            assert not program.hands_over_query(kind, layer)
        if program.attends_in(layer):
            assert not program.selects


@pytest.mark.parametrize("timing", list(Timing))
@pytest.mark.parametrize("link", ["shared", "message"])
def test_what_is_selected_for_the_next_step_is_told_to_another_host(
    timing: Timing, link: Link
) -> None:
    late = int(timing is Timing.SAME_STEP_HIDDEN)
    program = program_of(
        timing=timing, exact_layers=(3,), late_layers=late,
        placement=Placement(link=link, model_device="cuda", two_gpus=True),
    )  # fmt: skip
    for kind in DecodeKind:
        told = [x for x in range(6) if program.tells_of_next(kind, x)]
        awaited = [x for x in range(6) if program.awaits(kind, x)]
        outputs = [x for x in range(6) if program.attends_remotely(kind, x)]
        assert not {*told} & {*awaited, *outputs}, "one flag for one thing"
        is_due = kind is DecodeKind.SELECTING and link == "message" and outputs != [*range(6)]
        due = {*program.selecting} - {*awaited} if is_due else set()
        assert {*told} == due


@pytest.mark.parametrize("timing", list(Timing))
def test_nothing_is_asked_for_in_dense_steps(timing: Timing) -> None:
    program = program_of(timing=timing, index_dtype="int8")
    for layer in range(program.num_layers):
        assert not program.awaits(DecodeKind.DENSE, layer)
        assert not program.indexes(DecodeKind.DENSE, layer)
        assert not program.hands_over_query(DecodeKind.DENSE, layer)
        assert not program.hands_over_later(DecodeKind.DENSE, layer)


def test_layer_0_serves_all_that_nothing_comes_before() -> None:
    program = program_of(exact_layers=(), look_ahead=2)
    assert program.targets_of(0) == (0, 1, 2)
    assert program.targets_of(1) == (3,)
    assert program.targets_of(4) == program.targets_of(5) == ()
    assert program.last_entry == 3


def test_an_exact_layer_may_select_for_others() -> None:
    program = program_of(timing=Timing.SAME_STEP_QUERY, sources=(0, 0, 0, 3, 3, 3))
    assert program.sources == [0, 3]
    assert program.selecting == [1, 2, 3, 4, 5]
    assert program.fetched_by(0) == (1, 2)
    assert program.fetched_by(3) == (3, 4, 5)
    assert program.followers_of(1) == ()
    assert program.hands_over_query(DecodeKind.SELECTING, 0)
    assert not program.awaits(DecodeKind.SELECTING, 0)
    assert program.extends(0, seeds=True) == program.extends(0, seeds=False)


def test_late_layers_are_no_target_and_are_not_waited_for() -> None:
    program = program_of(exact_layers=(), late_layers=2)
    assert program.late_layers == (0, 1)
    assert program.targets_of(0) == ()
    assert program.reads_stream(0)
    assert not program.awaits(DecodeKind.SELECTING, 1)
    assert program.awaits(DecodeKind.SELECTING, 2)
    with pytest.raises(SettingsError, match="use at most"):
        program_of(num_layers=2, exact_layers=(), late_layers=2)


def test_slow_heads_are_those_of_the_policy_but_in_exact_layers() -> None:
    heads = ((0,), (1,), (0,), (1,), (0,), (1,))
    program = program_of(timing=Timing.EXACT_STEP, slow_heads=heads)
    assert program.slow_steps is RefreshRule.PERIOD
    assert program.slow_heads(0) == (0, 1)
    assert program.slow_heads(1) == (1,)
    assert program_of().slow_heads(3) == (0, 1)


def test_exact_layers_and_slow_steps_attend_where_k_and_v_are() -> None:
    far = Placement(link="message", two_gpus=True)
    program = program_of(timing=Timing.EXACT_STEP, placement=far)
    assert all(program.attends_remotely(kind, 0) for kind in DecodeKind)
    assert [k for k in DecodeKind if program.attends_remotely(k, 1)] == [DecodeKind.SELECTING]
    assert not program_of(placement=far).attends_remotely(DecodeKind.SELECTING, 1)
    here = program_of(timing=Timing.EXACT_STEP)
    assert not any(here.attends_remotely(DecodeKind.SELECTING, x) for x in range(6))


def test_when_the_index_takes_a_key_in_follows_from_what_is_declared() -> None:
    assert [program_of(index_dtype=x).index_interval for x in INDEX_DTYPES] == [0, 1, 16]
    assert program_of(index_dtype="int4", index="page_bounds").index_interval == 1
    for timing in (Timing.NONE, Timing.SAME_STEP_ATTENTION):
        assert program_of(index_dtype="int4", timing=timing).index_interval == 0


def test_what_is_kept_of_each_step_is_indexed_in_each() -> None:
    assert program_of(index_dtype="int4", keeps_queries=True).index_interval == 1
    every = program_of(timing=Timing.NEXT_STEP, keeps_queries=True)
    assert every.hands_over_later(DecodeKind.INDEXING, 1)
    assert not every.hands_over_later(DecodeKind.INDEXING, 0)


def test_all_exact_has_no_sparse_layer() -> None:
    program = program_of(timing=Timing.NONE, all_exact=True)
    assert not any(program.is_sparse_layer(x) for x in range(6))
    assert not program.selects
    assert not program.extends(3, seeds=True)
