# SPDX-License-Identifier: Apache-2.0
"""Both ranks derive the transfers of a step; these hold for every step and every setting."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemkv.cache_rank.protocol.declared import DeclaredPolicy
from tandemkv.cache_rank.protocol.errors import ProtocolError
from tandemkv.cache_rank.protocol.exchange_settings import ExchangeSettings
from tandemkv.cache_rank.protocol.messages import (
    PolicyTraits,
    RowFlag,
    RowStep,
    StepBegin,
    StepKind,
    Timing,
    decode,
    encode,
)
from tandemkv.cache_rank.protocol.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings import (
    RankSettings,
    SelectionSettings,
)
from tandemkv.cache_rank.protocol.step_program import (
    Direction,
    StepProgram,
    Transfer,
    TransferKind,
    exact_rows,
    seeded_rows,
    sparse_rows,
)

Kind = TransferKind
SELECTED = (Kind.PACK, Kind.DELTA, Kind.SEED)


def _program(
    *,
    num_layers: int = 6,
    timing: Timing = Timing.SAME_STEP_HIDDEN,
    exact_layers: tuple[int, ...] = (0,),
    look_ahead: int = 1,
    layers_per_pack: int = 4,
    refresh_every: int = 1,
    traits: PolicyTraits | None = None,
) -> StepProgram:
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
    )
    rank_settings = RankSettings(
        selection=SelectionSettings(
            budget_tokens=128,
            exact_layers=exact_layers,
            declared=DeclaredPolicy(layers_ahead=look_ahead),
            refresh_every=refresh_every,
        ),
        exchange=ExchangeSettings(layers_per_pack=layers_per_pack),
    )
    return StepProgram(model, rank_settings, timing, traits or PolicyTraits())


programs = st.builds(
    _program,
    num_layers=st.integers(1, 9),
    timing=st.sampled_from(Timing),
    exact_layers=st.sets(st.integers(0, 8)).map(lambda s: tuple(sorted(s))),
    look_ahead=st.integers(0, 3),
    layers_per_pack=st.integers(1, 9),
    refresh_every=st.integers(1, 3),
)


def _row(row: int, length: int, prefix_len: int, flags: int = 0, window: int = 0) -> RowStep:
    return RowStep(
        row=row, generation=1, length=length, prefix_len=prefix_len, flags=flags, window=window
    )


def _step(kind: StepKind, rows: list[RowStep], *, step_id: int = 6, dirty: int = 0) -> StepBegin:
    slots = sum(r.length for r in rows) if kind == StepKind.EXTEND else len(rows)
    return StepBegin(
        epoch=1,
        step_id=step_id,
        kind=kind,
        rows=rows,
        dirty=[_row(9, dirty, dirty)] if dirty else [],
        num_table_slots=slots + dirty,
        applied_seq=0,
    )


@st.composite
def steps(draw: st.DrawFn) -> StepBegin:
    kind = draw(st.sampled_from(StepKind))
    rows = []
    for number in range(draw(st.integers(0, 4))):
        length = draw(st.integers(1, 300))
        flags = draw(st.integers(0, 15))
        if kind == StepKind.EXTEND:
            prefix = draw(st.integers(0, length))
            window = min(64, length - prefix) if flags & RowFlag.SEED else 0
            rows.append(_row(number + 1, length, prefix, flags & ~RowFlag.SLOW, window))
        else:
            rows.append(_row(number + 1, length, length - 1, flags & ~RowFlag.SEED))
    return _step(kind, rows, step_id=draw(st.integers(0, 9)), dirty=draw(st.integers(0, 20)))


def _of(transfers: list[Transfer], *kinds: TransferKind) -> list[Transfer]:
    return [t for t in transfers if t.kind in kinds]


@given(programs, steps())
@settings(max_examples=300, deadline=None)
def test_both_ranks_derive_the_same_list(program: StepProgram, step: StepBegin) -> None:
    theirs = decode(encode(step))
    assert isinstance(theirs, StepBegin)
    twin = StepProgram(
        program.model,
        RankSettings.model_validate_json(program.settings.model_dump_json()),
        program.timing,
    )
    assert twin.transfers(theirs) == program.transfers(step)


@given(programs, steps())
@settings(max_examples=300, deadline=None)
def test_properties_of_every_list(program: StepProgram, step: StepBegin) -> None:
    transfers = program.transfers(step)
    num_layers = program.model.num_layers
    exact_layers = program.settings.selection.exact_layer_ids
    assert all(t.num_elements > 0 and min(t.shape) > 0 for t in transfers)
    assert all(0 <= layer < num_layers for t in transfers for layer in t.layers)
    for t in _of(transfers, *SELECTED, Kind.QUERY, Kind.SEED_QUERY):
        assert not set(t.layers) & set(exact_layers)
    # What the peer needs to answer comes first, and each answer has its question.
    position = {(t.kind, t.layers): n for n, t in enumerate(transfers)}
    assert len(position) == len(transfers)
    for question, answer in (
        (Kind.EXACT_QUERY, Kind.EXACT_OUTPUT),
        (Kind.QUERY, Kind.PACK),
        (Kind.SEED_QUERY, Kind.SEED),
    ):
        asked = [t.layers for t in _of(transfers, question)]
        for layers in asked:
            assert position[question, layers] < position[answer, layers]
    assert len(_of(transfers, Kind.EXACT_QUERY)) == len(_of(transfers, Kind.EXACT_OUTPUT))
    down = {Kind.RESTORE, Kind.SEED, Kind.PACK, Kind.EXACT_OUTPUT, Kind.DELTA}
    assert all((t.direction is Direction.DOWN) == (t.kind in down) for t in transfers)


@given(programs, steps())
@settings(max_examples=200, deadline=None)
def test_each_layer_is_restored_and_stored_exactly_once(
    program: StepProgram, step: StepBegin
) -> None:
    transfers = program.transfers(step)
    layers = list(range(program.model.num_layers))
    restored = [layer for t in _of(transfers, Kind.RESTORE) for layer in t.layers]
    chunks = [layer for t in _of(transfers, Kind.CHUNK_KV) for layer in t.layers]
    stored = [layer for t in _of(transfers, Kind.STEP_KV) for layer in t.layers]
    if step.kind == StepKind.EXTEND:
        assert restored == (layers if any(r.prefix_len for r in step.rows) else [])
        assert chunks == (layers if any(r.length > r.prefix_len for r in step.rows) else [])
        assert stored == []
    else:
        assert restored == chunks == []
        assert stored == (layers if step.rows else [])


@given(programs, st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_decode_selects_each_layer_exactly_once(program: StepProgram, num_rows: int) -> None:
    in_exact_steps = program.timing is Timing.EXACT_STEP
    flags = RowFlag.SPARSE | (RowFlag.SLOW if in_exact_steps else 0)
    rows = [_row(n, 500, 499, flags) for n in range(1, num_rows + 1)]
    for step_id in (0, 1, 5, 6):
        transfers = program.transfers(_step(StepKind.DECODE, rows, step_id=step_id))
        chosen = [layer for t in _of(transfers, Kind.PACK, Kind.DELTA) for layer in t.layers]
        exact = program.settings.selection.exact_layer_ids
        wanted = [i for i in range(program.model.num_layers) if i not in exact]
        refresh_every = program.settings.selection.refresh_steps
        if program.timing is Timing.NONE or (step_id % refresh_every and not in_exact_steps):
            wanted = []
        if program.timing is Timing.SAME_STEP_ATTENTION:  # nothing is sent, all are answered
            assert chosen == []
            for kind in (Kind.EXACT_QUERY, Kind.EXACT_OUTPUT):
                answered = [t.layers for t in _of(transfers, kind)]
                assert answered == [(layer,) for layer in range(program.model.num_layers)]
            continue
        assert chosen == wanted


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("exact", [(), (0,), (0, 1), (1, 3), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 6])
def test_targets_cover_each_selecting_layer_once(
    ahead: int, exact: tuple[int, ...], num_layers: int
) -> None:
    program = _program(num_layers=num_layers, exact_layers=exact, look_ahead=ahead)
    targets = [(t, layer) for layer in range(num_layers) for t in program.targets_of(layer)]
    assert [t for t, _ in targets] == [i for i in range(num_layers) if i not in exact]
    assert all(layer == max(0, t - ahead) for t, layer in targets)


def test_packs_partition_the_layers() -> None:
    assert _program(num_layers=6, layers_per_pack=4).packs() == [(0, 1, 2, 3), (4, 5)]
    assert _program(num_layers=2, layers_per_pack=9).packs() == [(0, 1)]


def test_empty_transfers_are_dropped() -> None:
    program = _program()
    assert program.transfers(_step(StepKind.DECODE, [])) == []
    no_prefix = program.transfers(_step(StepKind.EXTEND, [_row(1, 5, 0)]))
    assert {t.kind for t in no_prefix} == {Kind.SLOT_TABLE, Kind.CHUNK_KV}
    all_prefix = program.transfers(_step(StepKind.EXTEND, [_row(1, 5, 5)]))
    assert {t.kind for t in all_prefix} == {Kind.SLOT_TABLE, Kind.RESTORE}
    dense = program.transfers(_step(StepKind.DECODE, [_row(1, 5, 4)]))
    assert {t.kind for t in dense} == {Kind.SLOT_TABLE, Kind.STEP_KV}


def test_restores_stay_two_layers_ahead() -> None:
    transfers = _program(num_layers=4).transfers(_step(StepKind.EXTEND, [_row(1, 9, 4)]))
    order = [(t.kind, t.layers[0]) for t in transfers[1:]]
    restore, chunk = Kind.RESTORE, Kind.CHUNK_KV
    assert order == [
        (restore, 0),
        (restore, 1),
        (chunk, 0),
        (restore, 2),
        (chunk, 1),
        (restore, 3),
        (chunk, 2),
        (chunk, 3),
    ]


def test_shapes_by_hand() -> None:
    """Two sparse rows, one exact, one dense; layer 0 exact; look-ahead 1; two layers."""
    program = _program(num_layers=2, exact_layers=(0,), layers_per_pack=2)
    rows = [
        _row(1, 500, 499, RowFlag.SPARSE),
        _row(2, 600, 599, RowFlag.SPARSE),
        _row(3, 700, 699, RowFlag.EXACT),
        _row(4, 10, 9),
    ]
    transfers = program.transfers(_step(StepKind.DECODE, rows, dirty=7))
    nbytes = program.pack_layout(1, 2).nbytes
    assert [(t.kind, t.layers, t.shape, t.dtype) for t in transfers] == [
        (Kind.SLOT_TABLE, (), (11,), "int32"),
        (Kind.HIDDEN, (0,), (2, 48), "bfloat16"),
        (Kind.PACK, (1,), (nbytes,), "uint8"),
        (Kind.EXACT_QUERY, (0,), (3, 6, 8), "bfloat16"),
        (Kind.EXACT_OUTPUT, (0,), (3, 6, 9), "float32"),
        (Kind.EXACT_QUERY, (1,), (1, 6, 8), "bfloat16"),
        (Kind.EXACT_OUTPUT, (1,), (1, 6, 9), "float32"),
        (Kind.STEP_KV, (0, 1), (2, 4, 4, 8), "bfloat16"),
    ]


def test_shapes_of_an_extend_by_hand() -> None:
    program = _program(num_layers=2, exact_layers=(0,))
    rows = [
        _row(1, 100, 30, RowFlag.SEED | RowFlag.SPARSE, 64),
        _row(2, 50, 40, RowFlag.SEED | RowFlag.SPARSE, 10),
        _row(3, 20, 0),
    ]
    transfers = program.transfers(_step(StepKind.EXTEND, rows))
    resident = program.settings.selection.num_resident
    assert [(t.kind, t.layers, t.shape) for t in transfers] == [
        (Kind.SLOT_TABLE, (), (170,)),
        (Kind.RESTORE, (0,), (2, 70, 2, 8)),
        (Kind.RESTORE, (1,), (2, 70, 2, 8)),
        (Kind.CHUNK_KV, (0,), (2, 100, 2, 8)),
        (Kind.CHUNK_KV, (1,), (2, 100, 2, 8)),
        (Kind.SEED_QUERY, (1,), (74, 6, 8)),
        (Kind.SEED, (1,), (2, 2, resident)),
    ]


def test_next_step_policies_send_queries_and_get_deltas() -> None:
    program = _program(num_layers=6, timing=Timing.NEXT_STEP, exact_layers=(0, 4, 5))
    rows = [_row(1, 500, 499, RowFlag.SPARSE)]
    transfers = program.transfers(_step(StepKind.DECODE, rows))
    assert [t.shape for t in _of(transfers, Kind.STEP_KV)] == [(4, 1, 10, 8), (2, 1, 10, 8)]
    assert [t.layers for t in _of(transfers, Kind.DELTA)] == [(1, 2, 3)]
    assert Counter(t.kind for t in transfers)[Kind.EXACT_QUERY] == 3


def test_reuse_layers_send_no_query_and_get_their_anchors_packs() -> None:
    """Layer 0 exact and the anchor of 1; 2 the anchor of 3 to 5; two layers to a pack."""
    sources = PolicyTraits(layer_sources=(0, 0, 2, 2, 2, 2))
    program = _program(timing=Timing.SAME_STEP_QUERY, traits=sources, layers_per_pack=2)
    transfers = program.transfers(_step(StepKind.DECODE, [_row(1, 500, 499, RowFlag.SPARSE)]))
    kinds = (Kind.QUERY, Kind.PACK, Kind.EXACT_QUERY, Kind.EXACT_OUTPUT)
    assert [(t.kind, t.layers) for t in _of(transfers, *kinds)] == [
        (Kind.EXACT_QUERY, (0,)),
        (Kind.EXACT_OUTPUT, (0,)),
        (Kind.PACK, (1,)),
        (Kind.QUERY, (2,)),
        (Kind.PACK, (2,)),
        (Kind.PACK, (3, 4)),
        (Kind.PACK, (5,)),
    ]


def test_anchors_can_be_predicted_ahead() -> None:
    sources = PolicyTraits(layer_sources=(0, 1, 1, 1, 4, 4))
    program = _program(timing=Timing.SAME_STEP_HIDDEN, traits=sources)
    transfers = program.transfers(_step(StepKind.DECODE, [_row(1, 500, 499, RowFlag.SPARSE)]))
    assert [(t.kind, t.layers) for t in _of(transfers, Kind.HIDDEN, Kind.PACK)] == [
        (Kind.HIDDEN, (0,)),
        (Kind.PACK, (1,)),
        (Kind.PACK, (2, 3)),
        (Kind.HIDDEN, (3,)),
        (Kind.PACK, (4,)),
        (Kind.PACK, (5,)),
    ]


def test_slow_rows_are_exact_in_their_slow_heads_and_get_a_delta() -> None:
    """Rows: slow, fast, dense. Layer 0 is exact, for all heads; elsewhere head 1 alone is slow."""
    traits = PolicyTraits(slow_heads=((1,), (1,)))
    program = _program(num_layers=2, timing=Timing.EXACT_STEP, traits=traits, layers_per_pack=2)
    rows = [
        _row(1, 500, 499, RowFlag.SPARSE | RowFlag.SLOW),
        _row(2, 600, 599, RowFlag.SPARSE),
        _row(3, 10, 9),
    ]
    transfers = program.transfers(_step(StepKind.DECODE, rows))
    assert [(t.kind, t.layers, t.shape) for t in transfers[1:]] == [
        (Kind.EXACT_QUERY, (0,), (2, 6, 8)),
        (Kind.EXACT_OUTPUT, (0,), (2, 6, 9)),
        (Kind.EXACT_QUERY, (1,), (1, 3, 8)),
        (Kind.EXACT_OUTPUT, (1,), (1, 3, 9)),
        (Kind.STEP_KV, (0, 1), (2, 3, 4, 8)),
        (Kind.DELTA, (1,), (program.pack_layout(1, 1).nbytes,)),
    ]
    fast = program.transfers(_step(StepKind.DECODE, rows[1:]))
    assert {t.kind for t in fast[1:]} == {Kind.EXACT_QUERY, Kind.EXACT_OUTPUT, Kind.STEP_KV}
    assert {t.layers for t in _of(fast, Kind.EXACT_QUERY)} == {(0,)}


def test_row_groups() -> None:
    sparse, exact, both, dense = (
        _row(1, 9, 8, RowFlag.SPARSE),
        _row(2, 9, 8, RowFlag.EXACT),
        _row(3, 9, 8, RowFlag.SPARSE | RowFlag.EXACT),
        _row(4, 9, 8),
    )
    rows = [sparse, exact, both, dense]
    assert sparse_rows(rows) == [sparse]
    assert exact_rows(rows, layer_is_exact=False) == [exact, both]
    assert exact_rows(rows, layer_is_exact=True) == [sparse, exact, both]
    assert seeded_rows([_row(1, 9, 0, 5), _row(2, 9, 0, 4)]) == [_row(1, 9, 0, 5)]


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (StepKind.EXTEND, _row(1, 5, 6)),
        (StepKind.DECODE, _row(1, 5, 6)),
        (StepKind.EXTEND, _row(1, 100, 0, RowFlag.SEED, 65)),
        (StepKind.EXTEND, _row(1, 10, 0, RowFlag.SEED, 11)),
        (StepKind.EXTEND, _row(1, 10, 0, 0, 1)),
    ],
    ids=["prefix", "decode prefix", "window limit", "window length", "window without seed"],
)
def test_contradictions_are_refused(kind: StepKind, row: RowStep) -> None:
    with pytest.raises(ProtocolError, match="row=1"):
        _program().transfers(_step(kind, [row]))


def test_wrong_number_of_table_slots_is_refused() -> None:
    good = _step(StepKind.DECODE, [_row(1, 5, 4)], dirty=3)
    bad = StepBegin(
        epoch=1,
        step_id=6,
        kind=StepKind.DECODE,
        rows=good.rows,
        dirty=good.dirty,
        num_table_slots=5,
        applied_seq=0,
    )
    with pytest.raises(ProtocolError, match="num_table_slots=5"):
        _program().transfers(bad)
