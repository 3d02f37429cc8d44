# SPDX-License-Identifier: Apache-2.0
"""Link ``message``: what is attended to is what link ``shared`` gives, and nothing more is kept.

A real process of the engine; the forward pass is played here, between pumps that meet by TCP.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from clusters import write_clusters
from message_pumps import FarForward, Pumps, by_link_shared, check_same, far_played
from shared_forward import LENGTHS, QUICK, ROWS, Engines, Forward, settings_of
from tiny_model import CONFIG, write_model

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, HandshakeRefusedError
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.message.data_plane import CACHE_END, DataPlane
from tandemkv.cache_rank.protocol.message.keys import (
    make_keys,
)
from tandemkv.cache_rank.protocol.messages import Goodbye
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.step_ring import RESIDENT, StepRow
from tandemkv.cache_rank.pump import contents
from tandemkv.cache_rank.pump.near import Progress
from tandemkv.cache_rank.pump.near_service import NearPump
from tandemkv.inference_rank.links.base import ExtendRow
from tandemkv.inference_rank.links.connection import SharedConnection
from tandemkv.inference_rank.links.patience import limit_s
from tandemkv.kernels.samples import sample_offsets

pytestmark = pytest.mark.timeout(120)
_SELECTION = {"index_dtype": "int8", "sample_tokens": 8}


def _compare(
    folder: Path, policy: str, selection: dict[str, object], *, two_gpus: bool = True
) -> None:
    want = by_link_shared(folder, policy, two_gpus=two_gpus, **selection)
    settings = settings_of(policy, {"link": "message", "two_gpus": True}, **selection)
    with far_played(folder, settings) as (played, _):
        check_same(played.run(), want)
        assert played.num_lost == 0


@pytest.mark.parametrize("policy", ["oracle", "last_query", "quest"])
def test_what_is_attended_to_is_that_of_link_shared(tmp_path: Path, policy: str) -> None:
    _compare(tmp_path, policy, _SELECTION)


def test_an_exact_layer_that_others_follow(tmp_path: Path) -> None:
    """Its query goes both ways: it is selected with, and attends where K and V are."""
    _compare(tmp_path, "kascade", _SELECTION | {"anchors": (0, 1), "exact_layers": (0,)})


@pytest.mark.parametrize(
    ("policy", "heads"),
    [("oracle", [1, 1]), ("oracle", [1, 2]), ("quest", [1, 1]), ("lfps", [1, 1])],
)
def test_two_cache_ranks_with_a_part_of_the_kv_heads(
    tmp_path: Path, policy: str, heads: list[int]
) -> None:
    """What is attended to, samples included, is that of one cache rank."""
    shape = {"num_key_value_heads": sum(heads), "num_attention_heads": 4 * sum(heads)}
    config = CONFIG | shape | {"head_dim": 8}
    selection = dict(_SELECTION) if policy == "oracle" else {"index_dtype": "int8"}
    if policy == "lfps":
        pytest.importorskip("numba")
        selection = {"exact_layers": ()}
    want = by_link_shared(tmp_path, policy, two_gpus=policy != "lfps", config=config, **selection)
    placement = {"link": "message", "two_gpus": True, "head_shards": 2}
    with far_played(tmp_path, settings_of(policy, placement, **selection), config) as (played, _):
        check_same(played.run(), want)
        assert played.num_lost == 0
        own = [pumps.far._kept["kv"].shape[3] for pumps in played.pumps]
        assert own == heads, "each host has the K/V of its own heads, and no others"


def test_a_goodbye_is_of_its_own_epoch(tmp_path: Path) -> None:
    settings = settings_of("last_query", {"link": "message", "two_gpus": True}, **_SELECTION)
    with far_played(tmp_path, settings) as (played, _):
        want, near = played.run(), played.pumps[0].near
        epoch = near.status().epoch
        assert epoch > 0
        near._handle(b"", Goodbye(epoch=epoch - 1))
        assert near.status().epoch == epoch
        check_same(played.run(), want)


def test_another_cache_rank_than_the_one_that_is_meant_is_refused(tmp_path: Path) -> None:
    placement: dict[str, object] = {"link": "message", "two_gpus": True, "head_shards": 2}
    settings = settings_of("oracle", placement, **_SELECTION)
    make_keys(tmp_path / "keys")
    near, far = (RunDir.create(tmp_path / name) for name in ("near", "far"))
    model_dir = write_model(tmp_path / "model")
    near.of_rank(1, create=True)
    pumps = Pumps(near, far, settings, tmp_path / "keys", far_rank=1)
    try:
        with pytest.raises(HandshakeRefusedError, match="cache rank 1 is at this address"):
            FarForward(near, model_dir, settings)
    finally:
        pumps.close()


@pytest.mark.parametrize("policy", ["sfi", "sync_kv", "lfps"])
def test_policies_that_attend_to_tokens_that_are_not_here(tmp_path: Path, policy: str) -> None:
    """In slow steps, or themselves; on one host all of it is at hand."""
    selection: dict[str, object] = {"exact_layers": ()}
    if policy == "lfps":
        pytest.importorskip("numba")
    else:
        selection["index_dtype"] = "int8"
    if policy == "sync_kv":
        clusters = write_clusters(write_model(tmp_path / "model"), tmp_path / "clusters.json")
        selection["calibration"] = str(clusters)
    _compare(tmp_path, policy, selection, two_gpus=False)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_killed_cache_rank(tmp_path: Path, num_shards: int) -> None:
    placement = {"link": "message", "two_gpus": True, "head_shards": num_shards}
    settings = settings_of("last_query", placement, **_SELECTION)
    with far_played(tmp_path, settings) as (played, engines):
        want, rng = played.run(), random.Random(3)

        def kill() -> None:
            time.sleep(0.1 + rng.random())
            engines.kill(signal.SIGKILL)

        for _ in range(2):
            killer, losses = threading.Thread(target=kill), played.num_lost
            killer.start()
            while killer.is_alive() or played.num_lost == losses:
                check_same(played.run(), want)
            killer.join()
        assert played.num_lost == 2


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_host_that_has_lost_the_k_and_v_is_noticed(tmp_path: Path, num_shards: int) -> None:
    placement = {"link": "message", "two_gpus": True, "head_shards": num_shards}
    settings = settings_of("last_query", placement, **_SELECTION)
    with far_played(tmp_path, settings) as (played, _):
        want, connection = played.run(), played.connection
        played.pumps[-1].lose_far()
        deadline = time.monotonic() + 30
        while connection.lost_reason is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        connection.leave("another cache rank is lost")
        played.link.rewind()
        for _ in range(2):
            opened = connection.open_connection(timeout_s=60)
            assert opened.has_lost_memory, "until what was there is given up"
            opened.close()
        connection.forget_rows()
        opened = connection.open_connection(timeout_s=60)
        assert not opened.has_lost_memory
        connection.adopt(opened)
        connection.resume(())
        assert all(part.await_finish(part.step) for part in connection.parts)
        connection.confirm(connection.step)
        check_same(played.run(), want)


def test_who_gives_up_in_the_handshake_does_not_hold_up_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has welcomed it by then, and waits a minute for memory from the pump."""
    placement: dict[str, object] = {"link": "message", "two_gpus": True}
    settings = settings_of("last_query", placement, **_SELECTION)

    def give_up(*_: object) -> None:
        raise CacheRankLostError("the inference rank has given up")

    with far_played(tmp_path, settings) as (played, _):
        want, connection = played.run(), played.connection
        connection.leave("a test")
        played.link.rewind()
        with monkeypatch.context() as patched:
            patched.setattr(NearPump, "_begin", give_up)
            # It does not hang up either: we, too, give up before the engine would.
            patched.setattr(SharedConnection, "_built_s", lambda _: 2.0)
            with pytest.raises(CacheRankLostError):
                connection.open_connection(timeout_s=2)
        connection.adopt(connection.open_connection(timeout_s=15))
        with monkeypatch.context() as patched:
            # An engine that indexes its keys anew takes its time, and the scheduler has its turns.
            patched.setattr(SharedConnection, "wait", give_up)
            connection.resume(())
        assert all(part.await_finish(part.step) for part in connection.parts)
        connection.confirm(connection.step)
        check_same(played.run(), want)


def test_books_that_no_engine_keeps_are_refused_once(tmp_path: Path) -> None:
    """As where what a policy keeps has changed on disk. The K/V are as they were."""
    settings = settings_of("last_query", {"link": "message", "two_gpus": True}, **_SELECTION)
    with far_played(tmp_path, settings) as (played, _):
        played.run()
        connection = played.connection
        connection.leave("a test")
        played.pumps[0].far._books.allocate("strange", (3,), torch.int64)
        with pytest.raises(HandshakeRefusedError, match="'strange' is nothing that this engine"):
            connection.open_connection(timeout_s=30)
        opened = connection.open_connection(timeout_s=30)
        assert not opened.has_lost_memory
        connection.adopt(opened)
        connection.resume(
            tuple(
                StepRow(row=row, generation=10 + row, length=n, prefix_len=n, flags=RESIDENT)
                for row, n in zip(ROWS, LENGTHS, strict=True)
            )
        )
        assert all(part.await_finish(part.step) for part in connection.parts)
        assert connection.resumed_rows == (0, len(ROWS))


def test_another_server_that_came_meanwhile_has_replaced_the_k_and_v(tmp_path: Path) -> None:
    """Who comes back after it must not go on with what that one wrote."""
    settings = settings_of("last_query", {"link": "message", "two_gpus": True}, **_SELECTION)
    with far_played(tmp_path, settings) as (played, _):
        played.run()
        near = RunDir.create(tmp_path / "near2")
        far, _, keys, _ = played.pumps[0]._of_far
        other = Pumps(near, far, settings, keys, address=played.pumps[0]._address)
        try:
            second = FarForward(near, tmp_path / "model", settings)
            second.connection.close()
            second.kept.close()
        finally:
            other.close()
        assert played.connection.lost_reason is not None
        played.link.rewind()
        opened = played.connection.open_connection(timeout_s=60)
        assert opened.has_lost_memory
        opened.close()


@pytest.mark.parametrize("policy", ["oracle", "last_query"])
def test_slots_that_the_radix_tree_has_replaced(tmp_path: Path, policy: str) -> None:
    """Two prompts begin alike and are computed at once; one gets the other's slots, a third its."""
    shared = settings_of(policy, {"two_gpus": True}, **_SELECTION)
    run_dir, model_dir = RunDir.create(tmp_path / "shared"), write_model(tmp_path / "shared_model")
    engines = Engines(run_dir, model_dir, shared)
    try:
        alone = Forward(run_dir, model_dir, shared)
        want = _with_replaced_slots(alone)
        alone.connection.close()
        alone.kept.close()
    finally:
        engines.close()
    settings = settings_of(policy, {"link": "message", "two_gpus": True}, **_SELECTION)
    with far_played(tmp_path, settings) as (played, _):
        check_same(_with_replaced_slots(played), want)
        assert played.num_lost == 0


def _with_replaced_slots(played: Forward) -> list[list[torch.Tensor]]:
    common, random_of = 60, played.random

    def alike(seed: int, *shape: int) -> torch.Tensor:
        return random_of(seed - 1000 if 2000 <= seed < 2000 + common else seed, *shape)

    played.random = alike  # type: ignore[method-assign]
    played.until_done(lambda: played.prefill(1, LENGTHS[0]))
    played.until_done(lambda: played.prefill(2, LENGTHS[1]))
    freed = played.slots[1, :common].clone()
    played.slots[1, :common] = played.slots[0, :common]
    played.table[2, :common] = played.slots[0, :common]
    played.slots[2, :common] = freed
    played.until_done(lambda: played.prefill(3, LENGTHS[2]))
    return [
        played.until_done(lambda n=number: played.decode(n))  # type: ignore[misc]
        for number in range(1, 9)
    ]


def test_a_link_that_takes_long_over_a_prompt_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk in the midst of a prompt: until all its K/V are there nothing comes back."""
    monkeypatch.setattr(contents, "PIECE_BYTES", 4096)
    placement: dict[str, object] = {"link": "message", "two_gpus": True}
    settings = settings_of("oracle", placement, misses=QUICK, **_SELECTION)
    send, sent = DataPlane.send, list[int]()
    with far_played(tmp_path, settings) as (played, _):
        patience_s = limit_s(settings.exchange)

        def send_slowly(plane: DataPlane, body: torch.Tensor) -> None:
            if plane._peer == CACHE_END:
                time.sleep(patience_s / 8)
                sent.append(len(body))
            send(plane, body)

        monkeypatch.setattr(DataPlane, "send", send_slowly)
        started = time.monotonic()
        slots = played.store(2, 0, LENGTHS[1])
        played.link.begin_extend([_row(played, 2, prefix=0, length=LENGTHS[1])])
        for layer in range(played.model.num_layers):
            played.link.extend(layer, slots, [])
        played.link.end_extend()
        step = played.link.pass_step
        assert step is not None
        assert played.link.is_done(step), played.connection.lost_reason
        assert len(sent) > 12
        assert time.monotonic() - started > 1.5 * patience_s


def test_progress_of_two_threads_never_goes_back() -> None:
    raised = list[int]()

    def raise_to(_: int, count: int) -> None:
        time.sleep(0)  # another thread's turn
        raised.append(count)

    flags, at = SimpleNamespace(raise_to=raise_to), SimpleNamespace(PROGRESS=0)
    progress = Progress(SimpleNamespace(flags=flags, at=at))  # type: ignore[arg-type]

    def note() -> None:
        for _ in range(500):
            progress.note()

    threads = [threading.Thread(target=note) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == list(range(1, 1001))


def test_the_pump_that_holds_k_and_v_says_whether_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that hangs keeps an epoch from ending, and the pump from serving another one."""
    go_on, socket = threading.Event(), RunDir(tmp_path / "far").inference_socket

    def stalled_s() -> float:
        return request_status(socket, 5.0).values["stalled_s"]

    settings = settings_of("oracle", {"link": "message", "two_gpus": True}, **_SELECTION)
    with far_played(tmp_path, settings) as (played, _):
        guest = played.pumps[0].far._guest
        assert guest is not None
        assert guest.session is not None
        close = guest.session.close

        def close_late() -> None:
            assert go_on.wait(30)
            close()

        monkeypatch.setattr(guest.session, "close", close_late)
        assert stalled_s() == 0
        played.connection.leave("a test")
        deadline = time.monotonic() + 10
        while stalled_s() < 0.3:
            assert time.monotonic() < deadline
        go_on.set()
        while stalled_s():
            assert time.monotonic() < deadline
    assert not socket.exists()


@pytest.mark.parametrize("num_shards", [1, 2])
def test_k_and_v_of_earlier_prompts_are_not_kept_and_come_back(
    tmp_path: Path, num_shards: int
) -> None:
    placement = {"link": "message", "two_gpus": True, "head_shards": num_shards}
    settings = settings_of("oracle", placement, **_SELECTION)
    with far_played(tmp_path, settings) as (played, _):
        played.begin()
        name = [spec.name for spec in played.kept.specs].index("kv")
        descriptor = played.kept.descriptors[name]
        slots = played.slots[0, :90].long()
        want = played.far_kv()[:, :, slots].clone()
        assert want.count_nonzero() > 0
        first = os.fstat(descriptor).st_blocks
        played.link.begin_extend([_row(played, 1, prefix=90, length=91)])
        assert torch.equal(played.kept["kv"][:, :, slots], want)
        played.link.recover()
        played.link.begin_extend([_row(played, 1, prefix=0, length=1)])
        assert os.fstat(descriptor).st_blocks < first
        played.link.recover()


@pytest.mark.parametrize("num_shards", [1, 2])
def test_of_requests_that_are_taken_up_only_what_is_read_comes_back(
    tmp_path: Path, num_shards: int
) -> None:
    """Sink, latest tokens and samples; what lies between stays on the cache rank's host."""
    placement = {"link": "message", "two_gpus": True, "head_shards": num_shards}
    settings = settings_of("oracle", placement, **_SELECTION)
    with far_played(tmp_path, settings) as (played, _):
        played.begin()
        steps = [played.until_done(lambda n=n: played.decode(n)) for n in range(1, 5)]  # type: ignore[misc]
        played.kept["kv"].zero_()
        played.resume(4)
        selection, far = settings.selection, played.far_kv()
        num_sink, num_samples = selection.num_sink_tokens, selection.num_samples
        for slots, length in zip(played.slots, LENGTHS, strict=True):
            used, first = slots[: length + 4].long(), length + 4 - selection.num_recent_tokens
            offsets, _ = sample_offsets(torch.tensor(first - num_sink), num_samples)
            is_read = torch.zeros(length + 4, dtype=torch.bool)
            is_read[:num_sink] = is_read[first:] = is_read[num_sink + offsets] = True
            here = played.kept["kv"][:, :, used]
            is_here = (here != 0).flatten(3).any(-1).flatten(0, 1)
            assert bool((is_here == is_read).all())
            assert torch.equal(here[:, :, is_read], far[:, :, used[is_read]])
        steps += [played.until_done(lambda n=n: played.decode(n), n - 1) for n in range(5, 9)]  # type: ignore[misc]
        # A prompt that continues one of them has all of it.
        used = played.slots[0, : LENGTHS[0] + 8].long()
        played.link.begin_extend([_row(played, 1, prefix=len(used), length=len(used) + 1)])
        assert torch.equal(played.kept["kv"][:, :, used], played.far_kv()[:, :, used])
        played.link.recover()
    check_same(steps, by_link_shared(tmp_path, "oracle", **_SELECTION)[:8])


def _row(played: Forward, row: int, *, prefix: int, length: int) -> ExtendRow:
    played.table[row, :length] = played.slots[row - 1, :length]
    return ExtendRow(row=row, prefix_len=prefix, length=length, table=played.table[row, :length])
