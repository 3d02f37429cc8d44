# SPDX-License-Identifier: Apache-2.0
"""The containers of deploy/kubernetes/pair, as processes on a CPU with the same arguments.

Compose has the same commands (`test_deploy.py`). Model, device, port and sizes are this machine's,
and mounts are folders. One pod for all of it, in this order.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from containers import Container, await_ready, can_be_apart, namespaces
from exactness import compare, run
from manifests import CONTAINERS, KUBERNETES, containers_of, pod_of
from nothing_lost import wait_for
from rank_servers import (
    CAPACITY_TOKENS,
    CHUNK_TOKENS,
    SMALL_SELECTION,
    Server,
    free_port,
    model_dir,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("deep_model")]

LONG_TOKENS, FEW_TOKENS = 24, 4
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Pod:
    """The three containers, by name, and the server that they make."""

    containers: dict[str, Container]
    server: Server
    run_dir: Path

    def __getitem__(self, name: str) -> Container:
        return self.containers[name]

    def await_ready(self) -> None:
        """Return once requests are taken."""
        await_ready(self.server, *self.containers.values())


def settings_here(port: int) -> dict[str, Any]:
    """The deployed settings, for the model and the CPU of this machine."""
    deployed = yaml.safe_load((KUBERNETES / "pair" / "settings.yaml").read_text(encoding="utf-8"))
    del deployed["dtype"], deployed["max_context"]
    found: dict[str, Any] = deployed | {
        "model": model_dir(),
        "device": "cpu",
        "host": "127.0.0.1",
        "allow_remote": False,
        "port": port,
        "max_running_requests": 6,
        "chunked_prefill_size": CHUNK_TOKENS,
        "selection": SMALL_SELECTION,
        "cache": {"capacity_tokens": CAPACITY_TOKENS},
    }
    return found


@pytest.fixture(scope="module")
def pod(of_serve: list[Any]) -> Iterator[Pod]:
    del of_serve  # that server has ended: never two at a time
    work, port = Path(tempfile.mkdtemp(prefix="tkv-")), free_port()
    paths = {"/run/tandemkv": work / "run", "/settings": work / "settings"}
    for path in paths.values():
        path.mkdir()
    (work / "settings" / "settings.yaml").write_text(yaml.safe_dump(settings_here(port)))
    made = {name: Container(spec, paths, work) for name, spec in containers_of("pair").items()}
    assert tuple(made) == CONTAINERS
    run_dir = work / "run" / "pair"
    try:
        for name, container in made.items():
            container.start()
            if name != "inference-rank":
                container.await_start()
        inference = made["inference-rank"]
        server = Server(f"http://127.0.0.1:{port}", inference.main.pid, inference.log, run_dir)
        found = Pod(made, server, run_dir)
        found.await_ready()
        yield found
    finally:
        for container in reversed(made.values()):
            container.kill()
        shutil.rmtree(work)


@pytest.fixture(scope="module")
def want(pod: Pod, small_asked: list[list[int]]) -> list[int]:
    """What an undisturbed pod says to the longer prompt."""
    return long_answer(pod, small_asked[-1])


def long_answer(pod: Pod, prompt: list[int], new_tokens: int = LONG_TOKENS) -> list[int]:
    body = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    return list(pod.server.generate(input_ids=prompt, sampling_params=body)["output_ids"])


def decoding(pod: Pod, since: float) -> bool:
    return pod.server.values()[0]["decode_steps_total"] > since + 2


def held(pod: Pod) -> set[int]:
    """Inodes of the memory whose descriptors the container `memory` holds."""
    files = (Path("/proc") / str(pod["memory"].main.pid) / "fd").iterdir()
    return {file.stat().st_ino for file in files if "memfd:" in str(file.readlink())}


def test_tokens_are_those_of_serve(
    pod: Pod, of_serve: list[Any], small_asked: list[list[int]], new_tokens: int
) -> None:
    found = compare(run(pod.server, small_asked, new_tokens=new_tokens, at_once=1), of_serve)
    assert found["pass"], found
    inference, cache = pod.server.values()
    assert inference["sparse_rows_total"] > 0
    assert cache["fetched_rows_total"] > 0
    code, status = pod.server.get("/tandemkv/status")
    assert (code, status["ready"]) == (200, True)
    assert status["inference_rank"]["info"]["link"] == "shared"
    assert "not held" not in pod["inference-rank"].log.read_text()


def test_the_memory_holds_descriptors_and_no_more(pod: Pod) -> None:
    memory = pod["memory"].main
    assert not [item.path for item in memory.memory_maps() if "torch" in item.path]
    assert len(held(pod)) >= 2
    assert memory.memory_info().rss < 128 << 20  # half of its limit: a probe takes as much
    modes = {path.name: path.stat().st_mode & 0o777 for path in pod.run_dir.glob("*.sock")}
    assert {modes["holder.sock"], modes["memory.sock"], modes["control.sock"]} == {0o600}
    assert pod.run_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not can_be_apart(), reason="this machine allows no namespaces")
def test_no_container_sees_the_processes_of_another(pod: Pod) -> None:
    found = [namespaces(container.main) for container in pod.containers.values()]
    for kind in ("pid", "ipc", "mnt"):
        assert len({each[kind] for each in found}) == 3, kind
    memory, cache_rank, inference = (each["net"] for each in found)
    assert len({memory, cache_rank, inference}) == 3  # sockets in the volume are enough


def test_a_killed_cache_rank_costs_a_pause(
    pod: Pod, small_asked: list[list[int]], want: list[int]
) -> None:
    before, cache_rank = held(pod), pod["cache-rank"]
    steps = pod.server.values()[0]["decode_steps_total"]
    assert cache_rank.probe("livenessProbe") == 0
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(long_answer, pod, small_asked[-1])
        wait_for(lambda: decoding(pod, steps), "the request does not start", PATIENCE_S)
        cache_rank.kill()
        assert cache_rank.probe("livenessProbe") == 1
        assert not answer.done(), "the kill came too late"
        cache_rank.start()
        assert answer.result(timeout=120) == want
    inference, _ = pod.server.values()
    assert inference["cache_rank_lost_total"] == 1
    assert inference["restored_rows_total"] >= 1
    assert inference["requests_failed_total"] == inference["recomputed_requests_total"] == 0
    assert held(pod) >= before, "K/V and books are those of before"
    assert cache_rank.probe("livenessProbe") == 0
    assert all(pod[name].is_running for name in CONTAINERS)


def test_a_killed_memory_costs_nothing_and_is_given_all_again(
    pod: Pod, small_asked: list[list[int]], want: list[int]
) -> None:
    before = held(pod)
    pod["memory"].kill()
    assert long_answer(pod, small_asked[-1], FEW_TOKENS) == want[:FEW_TOKENS]
    pod["memory"].start()
    pod["memory"].await_start()
    assert held(pod) == set()
    cache_rank = pod["cache-rank"]
    cache_rank.main.suspend()  # from here nobody but the liveness probe can tell, and end it
    assert cache_rank.probe("livenessProbe") == 1
    cache_rank.kill()
    cache_rank.start()
    assert long_answer(pod, small_asked[-1], FEW_TOKENS) == want[:FEW_TOKENS]
    assert held(pod) == before


@pytest.mark.slow
def test_an_inference_rank_that_is_started_again_gets_the_same_memory(
    pod: Pod, small_asked: list[list[int]], want: list[int]
) -> None:
    before = held(pod)
    pod["inference-rank"].kill()
    assert pod["cache-rank"].is_running
    pod["inference-rank"].start()
    pod.await_ready()
    assert long_answer(pod, small_asked[-1]) == want
    assert held(pod) & before, "K/V were made anew"


def test_sigterm_drains_and_leaves_nothing(pod: Pod, small_asked: list[list[int]]) -> None:
    steps = pod.server.values()[0]["decode_steps_total"]
    grace_s = pod_of("pair")["terminationGracePeriodSeconds"]
    every = [
        process
        for container in pod.containers.values()
        for process in (container.main, *container.main.children(recursive=True))
    ]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(long_answer, pod, small_asked[-1])
        wait_for(lambda: decoding(pod, steps), "the request does not start", PATIENCE_S)
        begun = time.monotonic()
        pod["inference-rank"].stop(grace_s)
        assert len(answer.result(timeout=1.0)) == LONG_TOKENS
    for name in ("cache-rank", "memory"):  # as sidecars end: the last that was started first
        assert pod[name].is_running
        pod[name].stop(grace_s - (time.monotonic() - begun))
    wait_for(lambda: not any(p.is_running() for p in every), "processes are left", 5.0)
    # SGLang's scheduler leaves the file of its socket, which nobody serves: the next start takes it
    # over, and the volume goes with the pod.
    left = {path.name for path in pod.run_dir.glob("*.sock")}
    assert left <= {"inference.sock"}
