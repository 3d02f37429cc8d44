# SPDX-License-Identifier: Apache-2.0
"""Two engines with a KV head each: what is attended to is that of one, also when one is killed.

The engines are real processes; the forward pass is played here.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from shared_forward import QUICK, Engines, Forward, settings_of
from tiny_model import CONFIG, write_model

from tandemkv.cache_rank.protocol.memory.descriptor_holder import DescriptorHolder
from tandemkv.cache_rank.protocol.memory.shared_region import is_pool
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.inference_rank.links.sharded import ShardedConnection

pytestmark = pytest.mark.timeout(240)
SHARDS = 2
Steps = list[list[torch.Tensor]]


@contextmanager
def playing(
    folder: Path, policy: str, num_shards: int, *, num_heads: int = 2, two_gpus: bool = False
) -> Iterator[tuple[Forward, list[Engines]]]:
    """Yield a forward pass, and the processes of each cache rank; laid out for GPUs if so asked."""
    placement = {"head_shards": num_shards, "two_gpus": two_gpus}
    samples = 8 if policy == "oracle" else 0
    settings = settings_of(policy, placement, misses=QUICK, sample_tokens=samples)
    run_dir = RunDir.create(folder / "run")
    heads = {"num_key_value_heads": num_heads, "num_attention_heads": 4 * num_heads, "head_dim": 8}
    model_dir = write_model(folder / "model", CONFIG | heads)
    with ExitStack() as stack:
        engines = []
        for rank in range(num_shards):
            own = run_dir.of_rank(rank, create=True)
            holder = DescriptorHolder(own.holder_socket, own.token)
            stack.callback(holder.close)
            engines.append(Engines(own, model_dir, settings, rank))
            stack.callback(engines[-1].close)
        played = Forward(run_dir, model_dir, settings)
        stack.callback(played.kept.close)
        stack.callback(played.connection.close)
        yield played, engines


def same(found: Steps, wanted: Steps) -> bool:
    return all(
        torch.equal(a, b)
        for mine, theirs in zip(found, wanted, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize(
    ("policy", "faults"),
    [
        ("oracle", [(1, signal.SIGKILL), (0, signal.SIGSTOP)]),
        ("last_query", [(0, signal.SIGKILL)]),
        ("quest", []),
    ],
)
def test_what_is_attended_to_is_that_of_one_engine(
    tmp_path: Path, policy: str, faults: list[tuple[int, signal.Signals]]
) -> None:
    with playing(tmp_path / "one", policy, 1) as (played, _):
        want = played.run()
    assert not all(torch.equal(a, b) for a, b in zip(want[0], want[-1], strict=True)), "of use"
    with playing(tmp_path / "two", policy, SHARDS) as (played, engines):
        assert isinstance(played.connection, ShardedConnection)
        assert same(played.run(), want)
        pids = [each.serving() for each in engines]
        assert len(set(pids)) == SHARDS
        for killed, number in faults:
            before = [each.serving() for each in engines]
            losses, lost = played.num_lost, played.counters.cache_rank_lost_total
            killer = threading.Thread(target=kill, args=(engines[killed], number))
            killer.start()
            while killer.is_alive() or played.num_lost == losses:
                assert same(played.run(), want)
            killer.join()
            assert played.counters.cache_rank_lost_total == lost + 1
            after = [each.serving() for each in engines]
            assert after[killed] != before[killed]
            assert after[1 - killed] == before[1 - killed], "it was told, and not ended"


@pytest.mark.parametrize(("num_heads", "two_gpus"), [(3, False), (3, True), (5, True)])
def test_one_may_have_more_heads_than_another(
    tmp_path: Path, num_heads: int, two_gpus: bool
) -> None:
    """As on GPUs of their own too, where layers of the pool lie on either."""
    found = []
    for count in (1, 2):
        made = playing(
            tmp_path / str(count), "oracle", count, num_heads=num_heads, two_gpus=two_gpus
        )
        with made as (played, _):
            found.append(played.run())
            names = [spec.name for spec in played.kept.specs if is_pool(spec)]
            assert names == (["kv_0", "kv_1"] if two_gpus and count == 2 else ["kv"])
    assert same(*found)


def kill(engines: Engines, number: signal.Signals) -> None:
    time.sleep(0.3)
    engines.kill(number)


def test_an_epoch_is_lost_by_name_and_the_others_are_left(tmp_path: Path) -> None:
    with playing(tmp_path, "last_query", SHARDS) as (played, engines):
        connection = played.connection
        assert isinstance(connection, ShardedConnection)
        assert connection.lost_reason is None
        played.begin()
        engines[1].kill(signal.SIGKILL)
        deadline = time.monotonic() + 20
        while connection.lost_reason is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert connection.lost_reason.startswith("cache rank 1: ")
        assert [part.lost_reason is None for part in connection.parts] == [True, False]
        connection.leave("told")
        assert connection.lost_reason.startswith("cache rank 1: "), "why, not whom it was told"
        assert [part.has_left for part in connection.parts] == [True, False]
        epochs = [part.epoch for part in connection.parts]
        played.resume(None)
        assert connection.lost_reason is None
        assert [part.epoch for part in connection.parts] == [n + 1 for n in epochs]
        assert len({part.step for part in connection.parts}) == 1
