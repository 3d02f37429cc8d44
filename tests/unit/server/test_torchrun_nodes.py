# SPDX-License-Identifier: Apache-2.0
"""torchrun on several nodes, over fake ranks: each process has its rank, and cleans up alone."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchrun_processes import PATIENCE_S, Launched, launched_processes

from tandemkv.cache_rank.protocol.message.keys import make_keys

ANY = "tcp://127.0.0.1:0"
"""For tests, where nobody looks for it there."""


@pytest.fixture
def launched() -> Iterator[Launched]:
    with launched_processes() as found:
        make_keys(found.root / "keys")
        yield found


def start(
    launched: Launched, cache_mode: str, *options: str, address: str = ANY, count: int = 2
) -> None:
    """Start `count` nodes of one process each, with as many addresses as `address` has."""
    keys = ("--link-keys", str(launched.root / "keys"))
    words = ("--cache-rank-address", address, *keys, *options)
    launched.start_workers(cache_mode, *words, count=count, nodes=count)


def wait_served(launched: Launched, cache_ranks: int = 1) -> None:
    launched.wait_ready()
    launched.wait_for(lambda: launched.text().count("cache rank at tcp://") == cache_ranks)


def end_first(launched: Launched) -> None:
    launched.wait_for(lambda: "Ctrl-C stops" in launched.text())
    launched.processes[0].terminate()
    assert launched.processes[0].wait(PATIENCE_S) == 1


def names(paths: list[Path]) -> list[str]:
    return sorted(path.name.rpartition("-")[2] for path in paths)


def test_sigterm_to_all_nodes_ends_all(launched: Launched) -> None:
    start(launched, "serve", address=f"{ANY},tcp://127.0.0.2:0", count=3)
    wait_served(launched, 2)
    # One fake that is up stands for both: the other one may have to start yet.
    launched.wait_for(lambda: len(launched.pids("cache")) == 2)
    assert len(launched.run_dirs()) == 3
    assert {"cache0", "cache1"} < set(names(launched.run_dirs()))
    for process in launched.processes:
        process.send_signal(signal.SIGTERM)
    assert launched.wait() == [1, 1, 1]  # torchrun does not look at it, see the next tests
    launched.assert_nothing_left()
    assert launched.text().count("\nstopped\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_a_signal_ends_has_failed(
    launched: Launched, rank: int, number: signal.Signals
) -> None:
    """The other one is on another node, and lives on until torchrun ends it."""
    start(launched, "serve")
    wait_served(launched)
    ended, other = launched.processes[rank], launched.processes[1 - rank]
    ended.send_signal(number)
    assert ended.wait(PATIENCE_S) == (1 if number == signal.SIGTERM else -number)
    launched.wait_for(lambda: len(launched.run_dirs()) == 1)
    assert other.poll() is None
    other.terminate()
    assert other.wait(PATIENCE_S) == 1
    launched.assert_nothing_left()


def test_a_cache_rank_that_ends_too_often_is_reported_and_its_log_stays(
    launched: Launched,
) -> None:
    start(launched, "die")
    assert launched.processes[1].wait(PATIENCE_S) == 1
    assert "error: cache rank ended: exit code 3" in launched.text()
    end_first(launched)
    (run_dir,) = launched.run_dirs()
    assert names([run_dir]) == ["cache0"]
    assert [path.name for path in run_dir.iterdir()] == ["cache_rank.log"]


def test_standbys_are_beside_the_cache_rank(launched: Launched) -> None:
    start(launched, "serve", "--standby")
    wait_served(launched)
    launched.wait_for(lambda: len(launched.pids("cache")) == 2)
    for process in launched.processes:
        process.terminate()
    assert launched.wait() == [1, 1]
    launched.assert_nothing_left()


def test_a_refusal_is_said_on_each_node(launched: Launched) -> None:
    start(launched, "serve", count=3)
    assert launched.wait() == [2, 2, 2]
    assert launched.text().count("started 3 processes on 3 nodes") == 3
    assert launched.pids() == []
    assert launched.run_dirs() == []


def test_an_address_of_another_host_ends_its_process(launched: Launched) -> None:
    start(launched, "serve", address="tcp://192.0.2.1:7400")  # nobody's: RFC 5737
    assert launched.processes[1].wait(PATIENCE_S) == 2
    assert launched.text().count("is for rank 1 of torchrun") == 1
    end_first(launched)
    launched.assert_nothing_left()


def test_an_address_that_is_taken_leaves_nothing(launched: Launched) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        start(launched, "serve", address=address)
        assert launched.processes[1].wait(PATIENCE_S) == 1
    assert f"address={address} cannot be bound" in launched.text()
    assert not any(path.name.endswith("-cache0") for path in launched.run_dirs())
    end_first(launched)
    launched.assert_nothing_left()
