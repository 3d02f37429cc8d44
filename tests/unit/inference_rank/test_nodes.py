# SPDX-License-Identifier: Apache-2.0
"""How SGLang's processes of several hosts end, and what each of its threads is told."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from decided_args import decided_args
from sglang.srt.distributed import bootstrap

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.cache_rank.protocol.node_store import await_end, host_store
from tandemkv.cache_rank.protocol.progress import ProgressClock
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.inference_rank.sglang import nodes
from tandemkv.inference_rank.sglang import versions as sglang_versions

SCRIPT = Path(__file__).with_name("node_process.py")
PATIENCE_S = 30.0


def free_address() -> LinkAddress:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return LinkAddress("127.0.0.1", probe.getsockname()[1])


class Served:
    """A host without HTTP, whose schedulers end with `codes` after `let_end`."""

    def __init__(self, address: LinkAddress, *codes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT), address.as_node, *map(str, codes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"

    def let_end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)


@pytest.mark.parametrize(("codes", "ended"), [((0, 0), 0), ((0, 3), 1)])
def test_a_host_ends_with_its_schedulers(codes: tuple[int, ...], ended: int) -> None:
    served = Served(free_address(), *codes)
    served.let_end()
    assert served.exit_code() == ended


@pytest.mark.parametrize("codes", [(-9, 0), (0, -9)])
def test_a_host_ends_with_any_scheduler_that_is_killed(codes: tuple[int, ...]) -> None:
    """The others wait for it, and so would whoever waits for them in their order."""
    served = Served(free_address(), *codes)
    try:
        assert served.exit_code() == 1
    finally:
        served.let_end()


def test_a_signal_to_a_host_asks_the_first_one_to_end() -> None:
    """Its own schedulers are needed until node 0 has drained."""
    address = free_address()
    store = host_store(address, timedelta(seconds=PATIENCE_S))
    served = Served(address, 0)
    served.process.send_signal(signal.SIGTERM)
    assert await_end(address)
    assert served.process.poll() is None
    served.let_end()
    assert served.exit_code() == 0
    del store


def test_a_signal_ends_a_host_whose_first_one_is_gone() -> None:
    served = Served(free_address(), 0)
    served.process.send_signal(signal.SIGTERM)
    assert served.exit_code() == 0


def test_the_first_host_is_told_once_another_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ended = threading.Event(), threading.Event()

    def wait(_: LinkAddress) -> bool:
        return asked.wait(PATIENCE_S)

    monkeypatch.setattr(nodes, "await_end", wait)
    nodes.follow_end(free_address(), ended.set)
    assert not ended.is_set()
    asked.set()
    assert ended.wait(PATIENCE_S)


def test_a_store_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "await_end", lambda _: False)
    ended = threading.Event()
    nodes.follow_end(free_address(), ended.set)
    deadline = time.monotonic() + PATIENCE_S
    while any(thread.name == "tandemkv-nodes" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not ended.is_set()


def test_sums_of_several_hosts_are_not_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang takes all of --tp for processes of one host, on CPUs that it has kernels for."""
    told: list[Any] = []
    kernels = SimpleNamespace(
        init_cpu_threads_env=told.append, initialize=lambda *ranks: told.append(ranks)
    )
    fake_torch = SimpleNamespace(ops=SimpleNamespace(sgl_kernel=kernels))
    ranks = {"tp_size": 4, "tp_rank": 3}
    monkeypatch.setattr(bootstrap, "torch", fake_torch)
    monkeypatch.setattr(bootstrap, "_is_cpu_amx_available", True)
    monkeypatch.setattr(bootstrap, "get_parallel", lambda: SimpleNamespace(**ranks), raising=False)
    monkeypatch.setenv("LOCAL_SIZE", "")
    bind = bootstrap._init_cpu_threads_env
    takes_ranks = "tp_size" in inspect.signature(bind).parameters
    sglang_versions.bind_threads_of_one(bind, local_omp_cpuid=[7], **(ranks if takes_ranks else {}))
    assert told == [[7], (1, 0)]
    assert os.environ["LOCAL_SIZE"] == "1"


def test_hosts_have_to_plan_the_same_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, dict[str, str]] = {}
    monkeypatch.setattr(nodes, "check_equal", lambda rank, own: told.update({rank: own}))
    args: dict[str, Any] = {"max_running_requests": 4, "dtype": "float32", "device": "cpu"}
    for rank, chunk in enumerate((2048, 512)):
        monkeypatch.setattr(nodes.sglang_versions, "tensor_rank", lambda rank=rank: rank)
        given = SimpleNamespace(**args, chunked_prefill_size=chunk)
        nodes.check_settings(RankSettings(), given)
    differing = {name for name in told[0] if told[0][name] != told[1][name]}
    assert differing == {"chunked_prefill_size"}
    assert "selection.budget_tokens" in told[0]


def test_hosts_compare_what_sglang_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt's chunks it decides by the GPU's memory where they were not passed."""
    from tandemkv.inference_rank import process

    def check_equal(_rank: int, own: dict[str, str]) -> None:
        raise SettingsError(own["chunked_prefill_size"])

    settings = RankSettings(placement=Placement(link="shared", tp_size=2, num_nodes=2))
    monkeypatch.setattr(process.runtime_module, "settings_from_environment", lambda: settings)
    monkeypatch.setattr(nodes, "check_equal", check_equal)
    monkeypatch.setattr(nodes.sglang_versions, "tensor_rank", lambda: 0)
    args = decided_args(chunked_prefill_size=4096, tp_size=2)
    with pytest.raises(SettingsError, match=r"^4096$"):
        process.start(SimpleNamespace(device="cpu", server_args=args), ())


def test_a_host_is_ready_once_its_scheduler_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU steps are captured before, for minutes, and no HTTP server waits for that here."""
    from tandemkv.inference_rank import process, progress

    ready = StatusReply("inference_rank", epoch=1, ready=True, values={}, info={})
    runtime = SimpleNamespace(status=lambda: ready)
    monkeypatch.setattr(process.runtime_module, "current", lambda: runtime)
    monkeypatch.setattr(progress, "has_begun", False)
    monkeypatch.setattr(progress, "clock", ProgressClock())
    assert not process.status().ready
    progress.on_turn()
    assert process.status().ready


def test_the_address_comes_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandemkv.inference_rank.runtime import nodes_from_environment

    monkeypatch.delenv("TANDEMKV_NODES", raising=False)
    assert nodes_from_environment() is None
    monkeypatch.setenv("TANDEMKV_NODES", "10.0.0.1:7500")
    assert nodes_from_environment() == LinkAddress("10.0.0.1", 7500)
    monkeypatch.setenv("TANDEMKV_NODES", "10.0.0.1")
    with pytest.raises(SettingsError, match="HOST:PORT"):
        nodes_from_environment()
