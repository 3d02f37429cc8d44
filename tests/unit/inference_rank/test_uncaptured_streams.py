# SPDX-License-Identifier: Apache-2.0
"""Policies whose steps nobody captures, by link ``shared`` as between GPUs, on a CPU.

Both sides wait in flags that lie in the GPUs' memory there (`stream_forward`). What is attended to
must be what two processes on CPUs attend to, in which the hosts wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from clusters import write_clusters
from message_pumps import by_link_shared, check_same
from shared_forward import ROWS, Forward, settings_of
from stream_forward import HOMES, engine_of, link_by_streams, play_gpus
from tiny_model import CONFIG, write_model

from tandemkv.cache_rank.policies.base import Selection, SelectionInput
from tandemkv.cache_rank.policies.sync_kv import SyncKVPolicy
from tandemkv.cache_rank.protocol.engine_program import DecodeKind
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.service.stream_signals import StepGraphs
from tandemkv.inference_rank.links.connection import SharedConnection
from tandemkv.inference_rank.links.shared import SharedLink

pytestmark = pytest.mark.timeout(240)
_POLICIES = ["sfi", "sync_kv", "own_policy:WorstFirst"]
_SHAPE = CONFIG | {"num_hidden_layers": 4}
_PROMPTS = DecodeKind.DENSE, 0
_ENGINE_LIMIT_S = 3.0
"""How long the engine waits for the forward pass."""
Asked = list[tuple[DecodeKind, int]]


@pytest.fixture(autouse=True)
def _played_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    play_gpus(monkeypatch)
    captured: list[object] = []
    monkeypatch.setattr(StepGraphs, "capture", lambda *given: captured.append(given))
    yield
    assert not captured, "steps of these policies differ, or wait for the device"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the engine was to make ready, in order."""
    found, ask = Asked(), SharedConnection.ask_to_prepare

    def note(self: SharedConnection, *, variant: int, size: int) -> None:
        found.append((tuple(DecodeKind)[variant], size))
        ask(self, variant=variant, size=size)

    monkeypatch.setattr(SharedConnection, "ask_to_prepare", note)
    return found


class StreamForward(Forward):
    """The forward pass of a GPU."""

    homes = HOMES
    limit_s = 30.0

    def make_link(self) -> SharedLink:
        return link_by_streams(self, sends_beside=self.sizes.is_apart, limit_s=self.limit_s)

    @property
    def is_lost(self) -> bool:
        """Whether a wait was given up: what follows it is of no use."""
        return bool(self.link._signals._lost.any())  # type: ignore[attr-defined]


def _selection(folder: Path, policy: str, **more: object) -> dict[str, object]:
    selection = {"index_dtype": "int8", "exact_layers": (), **more}
    if policy == "sync_kv":
        model_dir = write_model(folder / "calibrated", _SHAPE)
        clusters = write_clusters(model_dir, folder / "clusters.json")
        selection["calibration"] = str(clusters)
    return selection


@contextmanager
def _played(
    folder: Path, policy: str, selection: dict[str, object], *, two_gpus: bool
) -> Iterator[StreamForward]:
    placement = {"two_gpus": two_gpus, "model_device": "cuda"}
    settings = settings_of(policy, placement, **selection)
    exchange = settings.exchange.model_copy(update={"transfer_timeout_s": _ENGINE_LIMIT_S})
    settings = settings.model_copy(update={"exchange": exchange})
    run_dir, model_dir = RunDir.create(folder / "run"), write_model(folder / "model", _SHAPE)
    with ExitStack() as running:
        running.enter_context(engine_of(run_dir, model_dir, settings))
        played = StreamForward(run_dir, model_dir, settings)
        running.callback(played.kept.close)
        running.callback(played.connection.close)
        yield played


@pytest.mark.parametrize("two_gpus", [False, True], ids=["one GPU", "two GPUs"])
@pytest.mark.parametrize("exact_layers", [(), (0,)], ids=["none exact", "one exact"])
@pytest.mark.parametrize("policy", _POLICIES)
def test_what_is_attended_to_is_that_of_hosts_that_wait(
    policy: str, exact_layers: tuple[int, ...], two_gpus: bool, tmp_path: Path, asked: Asked
) -> None:
    selection = _selection(tmp_path, policy, exact_layers=exact_layers)
    want = by_link_shared(tmp_path, policy, two_gpus=two_gpus, config=_SHAPE, **selection)
    with _played(tmp_path, policy, selection, two_gpus=two_gpus) as played:
        check_same(played.run(), want)
        assert played.num_lost == 0
        program = played.link.program
    assert asked[0] == _PROMPTS
    assert (DecodeKind.SELECTING, len(ROWS)) in asked
    kinds = [kind for kind, size in asked if size]
    assert len(set(kinds)) == len(kinds), "once in an epoch"
    assert all(program.asks(kind) for kind in kinds)


@pytest.mark.parametrize("policy", _POLICIES)
def test_an_epoch_that_ends_goes_back_a_step(policy: str, tmp_path: Path, asked: Asked) -> None:
    """The new engine makes ready again, before the step that is done twice."""
    selection = _selection(tmp_path, policy)
    with _played(tmp_path, policy, selection, two_gpus=True) as played:
        want = played.run()
        played.begin()
        for number, theirs in zip(range(1, 10), want, strict=False):
            played.decode(number)
            asked.clear()
            played.connection.leave("another one is lost")
            played.resume(number - 1)
            found = played.until_done(lambda n=number: played.decode(n), number - 1)  # type: ignore[misc]
            check_same([found], [theirs])
            slow = played.slow_of(number)
            is_selecting = slow is None or bool(slow.any())
            kind = DecodeKind.SELECTING if is_selecting else DecodeKind.INDEXING
            assert asked == [_PROMPTS, (kind, len(ROWS))]
        assert played.num_lost == 0


def test_a_policy_is_not_asked_in_a_step_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep what it is given: queries of the step before."""
    select, layers, late = SyncKVPolicy.select, list[int](), threading.Event()

    def slow_down(self: SyncKVPolicy, request: SelectionInput) -> Selection:
        layers.append(request.layer)
        if late.is_set():
            time.sleep(1.0)
        return select(self, request)

    monkeypatch.setattr(SyncKVPolicy, "select", slow_down)
    monkeypatch.setattr(StreamForward, "limit_s", 0.5)
    with _played(tmp_path, "sync_kv", _selection(tmp_path, "sync_kv"), two_gpus=True) as played:
        want = played.run()
        played.begin()
        layers.clear()
        late.set()
        played.decode(1)
        assert played.is_lost
        late.clear()
        step = played.link.pass_step
        assert step is not None
        assert not played.link.is_done(step)
        played.connection.leave("a step was not finished")
        played.resume(0)
        assert layers == [0, 1], "behind these its waits were in vain"
        check_same([played.until_done(lambda: played.decode(1), 0)], want[:1])
        assert played.num_lost == 0
