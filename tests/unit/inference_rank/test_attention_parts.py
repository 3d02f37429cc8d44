# SPDX-License-Identifier: Apache-2.0
"""What a decode step attends to, where resident sets lie, and which graph is replayed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tandemkv.cache_rank.policies.registry import resolve_selection
from tandemkv.cache_rank.protocol.engine import WARM_UP_STEPS, DenseLengths
from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.cache_rank.protocol.messages import RefreshRule
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.inference_rank.attention import graph_variants
from tandemkv.inference_rank.attention.backend import ResidentBackend
from tandemkv.inference_rank.attention.dense_steps import DenseSteps
from tandemkv.inference_rank.attention.resident_attention import AttendTable, RingTable
from tandemkv.inference_rank.attention.resident_home import OwnSet
from tandemkv.inference_rank.attention.samples import zeros_on
from tandemkv.inference_rank.links.side_stream import SideStream
from tandemkv.inference_rank.refresh import RefreshSchedule
from tandemkv.inference_rank.sglang import hooks
from tandemkv.kernels import streams
from tandemkv.kernels.step_flags import StepWait

CPU = torch.device("cpu")
ROWS1, CONTEXT, NUM_SLOTS = 4, 64, 400
NUM_RESIDENT, NUM_RECENT = 12, 8
SELECTION = SelectionSettings(
    policy="look_ahead",
    budget_tokens=12,
    resident_factor=1.0,
    num_sink_tokens=0,
    num_recent_tokens=NUM_RECENT,
)
MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=1,
    num_qo_heads=2,
    num_kv_heads=1,
    head_dim=4,
    hidden_size=8,
    max_context=CONTEXT,
    dtype="float32",
    model_hash="0",
)


def slot_table() -> torch.Tensor:
    """Slots of each position, all distinct."""
    order = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))
    return order[: ROWS1 * CONTEXT].view(ROWS1, CONTEXT).to(torch.int32)


@given(length=st.integers(1, CONTEXT), num_dense=st.sampled_from([0, 20, 37]))
def test_table_lists_the_set_and_the_latest_tokens(length: int, num_dense: int) -> None:
    table = AttendTable(
        num_resident=NUM_RESIDENT,
        num_recent=NUM_RECENT,
        num_dense=num_dense,
        first_slot=NUM_SLOTS,
        max_batch=3,
        device=CPU,
    )
    slots, lengths = slot_table(), torch.tensor([length, 1])
    table.load(torch.tensor([2, 0]), lengths, slots, num_dense)
    count = int(table.attended[0])
    listed = table.slots[0, :count].tolist()
    assert table.attended_on_host(lengths, num_dense).tolist() == table.attended[:2].tolist()
    if length <= num_dense:
        assert listed == slots[2, :length].tolist()
        return
    filled = min(NUM_RESIDENT, max(0, length - NUM_RECENT))
    start = NUM_SLOTS + 2 * NUM_RESIDENT
    recent = slots[2, max(0, length - NUM_RECENT) : length].tolist()
    assert listed == [*range(start, start + filled), *recent]


@given(prompt=st.integers(1, 50), steps=st.integers(1, 14), keeps_sink=st.booleans())
def test_own_set_holds_what_the_table_lists(prompt: int, steps: int, keeps_sink: bool) -> None:
    """After a prefill and some decode steps every listed slot holds the token it stands for."""
    lengths = DenseLengths.of(SELECTION, NUM_RESIDENT)
    pool = torch.arange(NUM_SLOTS, dtype=torch.float32)[:, None, None].expand(-1, 1, 4).clone()
    far = SimpleNamespace(
        get_kv_buffer=lambda _layer: (pool, pool), set_kv_buffer=lambda *_, **__: None
    )
    table = RingTable(
        num_resident=NUM_RESIDENT,
        num_recent=NUM_RECENT,
        num_dense=lengths.num_dense,
        max_batch=3,
        device=CPU,
    )
    home = OwnSet(far, table, MODEL, SELECTION, zeros_on(CPU), keeps_sink=keeps_sink)
    slots, row = slot_table(), 1
    home.fill(0, row, slots[row, :prompt])
    if prompt > lengths.num_dense and not keeps_sink:  # as the cache rank would: R tokens
        home.sets[0][0][row, :NUM_RESIDENT] = pool[slots[row, :NUM_RESIDENT].long()]
    for length in range(prompt + 1, min(CONTEXT, prompt + steps) + 1):
        table.load(torch.tensor([row]), torch.tensor([length]), slots, lengths.num_dense)
        newest = pool[slots[row, length - 1].long()][None]
        home.pool.set_kv_buffer(SimpleNamespace(layer_id=0), None, newest, newest)
        held = home.pool.get_kv_buffer(0)[0][table.slots[0, : int(table.attended[0])].long()]
        recent = range(max(0, length - NUM_RECENT), length)
        expected = range(length)
        if length > lengths.num_dense:
            expected = [*range(min(NUM_RESIDENT, length - NUM_RECENT)), *recent]
        assert sorted(held[:, 0, 0].tolist()) == sorted(slots[row, list(expected)].tolist())


class _Called(TorchDispatchMode):
    """Which operations of torch are called: on a GPU most are a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("prompt", [3, 40])
def test_a_set_that_an_engine_fills_takes_no_launches_for_a_sink(prompt: int) -> None:
    """It is filled in each layer of each prompt."""
    found = {}
    for keeps_sink in (False, True):
        pool = torch.zeros(NUM_SLOTS, 1, 4)
        far = SimpleNamespace(get_kv_buffer=lambda _layer, pool=pool: (pool, pool))
        sizes = {"num_resident": NUM_RESIDENT, "num_recent": NUM_RECENT, "num_dense": 0}
        table = RingTable(max_batch=3, device=CPU, **sizes)
        home = OwnSet(far, table, MODEL, SELECTION, zeros_on(CPU), keeps_sink=keeps_sink)
        slots = slot_table()[1, :prompt]
        with _Called() as called:
            home.fill(0, 1, slots)
        found[keeps_sink] = called.names
    assert found[False].count("index") == 2, "K and V of the pool, and no slots"
    assert "cat" not in found[False]
    has_sink = not home.is_dense(prompt)
    assert ("cat" in found[True]) == has_sink
    assert has_sink == (prompt == 40)


def test_a_write_waits_for_flags() -> None:
    far = SimpleNamespace(set_kv_buffer=lambda *_, **__: None)
    sizes = {"num_resident": NUM_RESIDENT, "num_recent": NUM_RECENT, "num_dense": 0}
    table = RingTable(max_batch=3, device=CPU, **sizes)
    home = OwnSet(far, table, MODEL, SELECTION, zeros_on(CPU))
    layer, token = SimpleNamespace(layer_id=0), torch.ones(1, 1, 4)
    flags, step, lost = (torch.tensor([x], dtype=torch.int32) for x in (4, 5, 0))
    wait = StepWait(flags=flags, step=step, lost=lost, timeout_s=0.01)
    home.await_in_write(wait)
    with pytest.raises(ContractError, match="left out the write"):
        home.await_in_write(wait)
    assert lost.item() == 0, "nothing has waited yet"
    home.pool.set_kv_buffer(layer, None, token, token)
    assert lost.item() == 5, "the flag is a step behind"
    lost.zero_()
    home.pool.set_kv_buffer(layer, None, token, token)  # nothing is awaited any more
    assert lost.item() == 0
    home.end_step()
    home.await_in_write(wait)
    with pytest.raises(ContractError, match="left out the write"):
        home.end_step()
    home.begin_step()  # after a step that failed
    home.end_step()


def test_dense_lengths() -> None:
    fitting = NUM_RESIDENT + NUM_RECENT
    assert DenseLengths.of(SELECTION, NUM_RESIDENT) == DenseLengths(
        num_dense=fitting, num_cold=fitting
    )
    longer = SELECTION.model_copy(update={"dense_tokens": 1000})
    assert DenseLengths.of(longer, NUM_RESIDENT) == DenseLengths(
        num_dense=1000, num_cold=1000 - WARM_UP_STEPS
    )
    never = SELECTION.model_copy(update={"dense_while_fits": False})
    assert DenseLengths.of(never, NUM_RESIDENT) == DenseLengths(num_dense=0, num_cold=0)
    # Nothing fills the sink of a row that outgrows the ring: it would be an earlier request's.
    sinks = resolve_selection(
        never.model_copy(update={"policy": "streaming", "num_sink_tokens": 4})
    )
    assert DenseLengths.of(sinks, 4).num_dense == 4 + NUM_RECENT


def test_side_stream_without_cuda_runs_in_place() -> None:
    side, seen = SideStream(CPU, 2), []
    with side.fork(torch.ones(1)):
        seen.append("fork")
        side.note_done(1)
    side.join(1)
    side.join_all()
    assert seen == ["fork"]


@pytest.mark.gpu
def test_a_lane_waits_for_another_one() -> None:
    device = torch.device("cuda", 0)
    side = SideStream(device, 2, num_lanes=2)
    slow, seen = torch.zeros(1, device=device), torch.zeros(1, device=device)
    with side.fork(lane=0):
        torch.cuda._sleep(50_000_000)
        slow.fill_(1)
    with side.fork(lane=1, after=0):
        seen.copy_(slow)
    side.join_all()
    assert seen.item() == 1


def kinds_of(interval: int, *, selects: bool = True) -> tuple[DecodeKind, ...]:
    rank = SimpleNamespace(selects=selects, index_interval=interval)
    backend: Any = SimpleNamespace(_program=rank)
    getter: Any = ResidentBackend.kinds
    kinds: tuple[DecodeKind, ...] = getter.fget(backend)
    return kinds


def test_kinds_of_steps() -> None:
    """The last one has the least beside the forward pass."""
    assert kinds_of(0) == (DecodeKind.SELECTING, DecodeKind.DENSE)
    assert kinds_of(1) == (DecodeKind.SELECTING, DecodeKind.INDEXING)
    assert kinds_of(64) == (DecodeKind.SELECTING, DecodeKind.INDEXING, DecodeKind.DENSE)
    assert kinds_of(64, selects=False) == (DecodeKind.DENSE,)


@pytest.mark.parametrize(
    ("kind", "is_late", "refresh_every", "may_be_sparse"),
    [
        (DecodeKind.SELECTING, False, 1, True),
        (DecodeKind.INDEXING, False, 1, False),
        (DecodeKind.DENSE, False, 1, False),
        (DecodeKind.DENSE, True, 1, True),  # selected for in the step before
        (DecodeKind.DENSE, False, 4, True),  # in one of the last four
    ],
)
def test_steps_that_attend_to_samples(
    kind: DecodeKind, is_late: bool, refresh_every: int, may_be_sparse: bool
) -> None:
    backend: Any = ResidentBackend.__new__(ResidentBackend)
    backend._kind = kind
    backend._program = SimpleNamespace(selects_for_next_step=is_late, refresh_every=refresh_every)
    assert backend._may_be_sparse is may_be_sparse


def test_slow_requests_take_what_was_attended_to_where_k_and_v_are() -> None:
    backend: Any = ResidentBackend.__new__(ResidentBackend)
    calls = ("enter_attention", "select_with_query", "attended", "await_set", "attend_selected")
    backend.link = SimpleNamespace(
        **dict.fromkeys(calls, lambda *_: None), remote_output=lambda _: torch.ones(3, 8)
    )
    backend._sparse = SimpleNamespace(attend=lambda *_, **__: torch.zeros(3, 8))
    backend._is_sparse, backend._last_layer, backend._probe = [True], 1, None
    backend._kind, backend._slow_far = DecodeKind.SELECTING, torch.tensor([1])
    backend._program = SimpleNamespace(selects_for_next_step=True)
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=2, head_dim=4)
    nothing, batch = torch.empty(0), SimpleNamespace(batch_size=3)
    out = backend.forward_decode(torch.zeros(3, 8), nothing, nothing, layer, batch)
    assert out.sum(1).tolist() == [0, 8, 0]


@pytest.mark.parametrize("by_tokens", [False, True])
def test_who_is_slow_is_asked_of_the_device_only_where_the_host_does_not_know(
    by_tokens: bool,
) -> None:
    backend: Any = ResidentBackend.__new__(ResidentBackend)
    rule = RefreshRule.BOUNDARY if by_tokens else RefreshRule.PERIOD
    refresh = RefreshSchedule(rule, 4, frozenset({7}))
    backend._program = SimpleNamespace(slow_steps=rule)
    backend._runtime = SimpleNamespace(refresh=refresh, rows_on_host=[2, 1, 3])
    lengths, found = torch.tensor([50, 60, 5]), []
    known = SimpleNamespace(input_ids=torch.tensor([1, 7, 7])) if by_tokens else SimpleNamespace()
    for _ in range(2):
        found.append(backend._slow_rows(known, lengths, 10).tolist())
    assert found == [[True, True, False], [False, by_tokens, False]]
    backend._runtime.rows_on_host = None
    known.req_pool_indices = torch.tensor([2, 4, 3])
    assert backend._slow_rows(known, lengths, 10).tolist() == [False, True, False]


def test_a_plan_waits_until_the_one_before_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def synchronize(self) -> None:
            done.append("read")

        def record(self, stream: str) -> None:
            done.append(f"queued on {stream}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{device}'s")
    fence = graph_variants.PlanFence(torch.device("cuda", 1))
    for _ in range(2):
        with fence.planning():
            done.append("written")
    assert done == ["read", "written", "queued on cuda:1's"] * 2
    with graph_variants.PlanFence(CPU).planning():
        done.clear()
    assert done == []


@pytest.mark.parametrize("interval", [0, 1, 16])
@pytest.mark.parametrize(
    ("lengths", "by_interval"),
    [
        ([3, 10], {0: DecodeKind.DENSE, 1: DecodeKind.INDEXING, 16: DecodeKind.DENSE}),
        ([3, 32], {0: DecodeKind.DENSE, 1: DecodeKind.INDEXING, 16: DecodeKind.INDEXING}),
        ([32, 41], dict.fromkeys((0, 1, 16), DecodeKind.SELECTING)),
    ],
)
def test_what_a_step_does(
    interval: int, lengths: list[int], by_interval: dict[int, DecodeKind]
) -> None:
    rank = SimpleNamespace(selects=True, refresh_every=1, index_interval=interval)
    dense = DenseLengths(num_dense=40, num_cold=40)
    backend: Any = SimpleNamespace(
        _program=rank, _of_step=dense, _num_steps=3, _is_behind_prompt=False
    )
    kind = ResidentBackend.kind_of(backend, torch.tensor(lengths))
    assert kind is by_interval[interval]
    assert kind in kinds_of(interval)
    rank.refresh_every = 2  # between two refreshes
    later = torch.tensor(lengths) + (torch.tensor(lengths) > 40)
    assert ResidentBackend.kind_of(backend, later) is not DecodeKind.SELECTING
    first = ResidentBackend.kind_of(backend, torch.tensor(lengths))
    assert (first is DecodeKind.SELECTING) == (41 in lengths), "a set that nothing was chosen for"
    rank.selects = False  # every layer is exact: no other graph is captured
    assert ResidentBackend.kind_of(backend, torch.tensor(lengths)) is DecodeKind.DENSE


def test_what_fills_up_a_captured_batch_does_not_decide_what_a_step_does() -> None:
    """The graph that is replayed is chosen by the requests alone."""
    rank = SimpleNamespace(selects=True, refresh_every=2, index_interval=0)
    none = DenseLengths(num_dense=0, num_cold=0)
    backend: Any = SimpleNamespace(
        _program=rank, _of_step=none, _num_steps=3, _is_behind_prompt=False
    )
    for lengths in ([500], [500, 1, 1]):
        assert ResidentBackend.kind_of(backend, torch.tensor(lengths)) is DecodeKind.DENSE
    backend._num_steps = 4
    for lengths in ([500], [500, 1, 1]):
        assert ResidentBackend.kind_of(backend, torch.tensor(lengths)) is DecodeKind.SELECTING


def test_a_small_step_attends_to_all_and_sets_are_made_ready_before_they_are_used() -> None:
    """Few tokens in all: nothing is selected, whoever has them. Then it is, and used later."""
    base = DenseLengths(num_dense=200, num_cold=140)
    dense = DenseSteps(base, 1000)
    assert dense.num_dense == 1000 + WARM_UP_STEPS
    alone, padded = torch.tensor([900]), torch.tensor([900, 1, 1])
    many = torch.tensor([900, 140])
    assert dense.of(many) == base  # nothing fell behind
    for lengths in (alone, padded, torch.tensor([500, 500])):
        whole = dense.of(lengths)
        assert (whole.num_dense, whole.num_cold) == (dense.num_dense, dense.num_dense)
    dense.advance(torch.tensor([100, 140]))  # neither has a set that is selected for
    assert dense.of(many) == base
    dense.advance(alone)
    for step in range(1, WARM_UP_STEPS + 1):
        joined = torch.cat([alone + step, many + 1000])
        assert dense.of(joined) == DenseLengths(num_dense=900 + step, num_cold=140)
        dense.advance(joined)
    assert dense.of(joined + 1) == base
    dense.advance(alone)
    assert dense.of(torch.tensor([800, 700])) == base  # who fell behind is gone
    assert DenseSteps(base, 0).of(alone) == base
    assert DenseSteps(base, 0).num_dense == 200


def test_rows_are_known_on_the_host_while_the_scheduler_runs_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nobody says so, asking the device for them waits for all that it has to do."""
    runtime = SimpleNamespace(
        rows_on_host=None,
        settings=SimpleNamespace(evaluation=False),
        running_reqs=[],
        client=None,
    )
    monkeypatch.setattr(hooks.runtime_module, "current", lambda: runtime)
    seen: list[list[int] | None] = []

    def run(_scheduler: object, batch: Any) -> str:
        seen.append(runtime.rows_on_host)
        if batch.fails:
            raise RuntimeError("no memory")
        return "done"

    def batch(*rows: int | None, fails: bool = False) -> Any:
        found = [SimpleNamespace(req_pool_idx=x) for x in rows]
        for req in found:
            req.kv = req  # where newer versions of SGLang have the row
        return SimpleNamespace(reqs=found, fails=fails)

    assert hooks._run_batch(run, None, batch(4, 2)) == "done"
    with pytest.raises(RuntimeError, match="no memory"):
        hooks._run_batch(run, None, batch(3, fails=True))
    hooks._run_batch(run, None, batch(4, None))
    assert seen == [[4, 2], [3], None]
    assert runtime.rows_on_host is None


class _Backend:
    captured_kind = DecodeKind.DENSE
    kinds: tuple[DecodeKind, ...] = tuple(reversed(DecodeKind))
    shares_gpu = False

    def kind_of(self, lengths: torch.Tensor) -> DecodeKind:
        return DecodeKind.SELECTING if bool((lengths > 10).any()) else DecodeKind.DENSE


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["plain", "beside linear attention"])
@pytest.mark.parametrize("shares_gpu", [True, False])
def test_each_batch_size_is_captured_for_each_kind_of_step(
    shares_gpu: bool, is_wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both share a GPU, on a stream that goes first."""
    backend = _Backend()
    backend.shares_gpu = shares_gpu
    seen_by_sglang = SimpleNamespace(full_attn_backend=backend) if is_wrapped else backend
    made: list[Any] = []
    own = SimpleNamespace(device=torch.device("cuda", 1))

    def stream(**wanted: Any) -> Any:
        made.append(SimpleNamespace(**wanted))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    streams._stream.cache_clear()
    graphs = SimpleNamespace(_capture_stream=own)
    runner, seen = SimpleNamespace(attn_backend=seen_by_sglang, backend=graphs), []

    def original(_runner: Any, size: int, *_: Any) -> None:
        seen.append((size, _[-1], backend.captured_kind, graphs._capture_stream))

    for size in (8, 4):
        seen.clear()
        graph_variants.capture_each(original, runner, size, print)
        used = made[0] if shares_gpu else own
        assert seen == [
            (size, "tandemkv-selecting", DecodeKind.SELECTING, used),
            (size, "tandemkv-indexing", DecodeKind.INDEXING, used),
            (size, "tandemkv-dense", DecodeKind.DENSE, used),
        ]
    assert graphs._capture_stream is own
    # One for all: graphs share memory within a stream only.
    assert [(x.device, x.priority) for x in made] == [(own.device, -2)] * shares_gpu
    streams._stream.cache_clear()
    backend.kinds = (DecodeKind.DENSE,)  # nothing goes on beside it
    seen.clear()
    graph_variants.capture_each(original, runner, 8, print)
    assert seen == [(8, "tandemkv-dense", DecodeKind.DENSE, own)]
    backend.kinds = _Backend.kinds
    if shares_gpu:
        seen.clear()
        graph_variants.capture_each(original, runner, 8, print, None, None, "newer")
        assert [found[:2] for found in seen] == [(8, "newer")] * 3
    with pytest.raises(ContractError, match="LoRA"):
        graph_variants.capture_each(original, runner, 8, print, None, "lora")
    if shares_gpu:
        runner.backend = SimpleNamespace()
        with pytest.raises(ContractError, match="no stream of its own"):
            graph_variants.capture_each(original, runner, 8, print)


@pytest.mark.parametrize(
    ("lengths", "label"),
    [([3, 10], DecodeKind.DENSE), ([3, 11], DecodeKind.SELECTING), (None, DecodeKind.SELECTING)],
)
def test_the_graph_that_a_batch_needs(lengths: list[int] | None, label: str) -> None:
    runner = SimpleNamespace(attn_backend=_Backend())
    batch = SimpleNamespace(seq_lens_cpu=None if lengths is None else torch.tensor(lengths))
    assert graph_variants.resolve(lambda *_: None, runner, batch) == label
