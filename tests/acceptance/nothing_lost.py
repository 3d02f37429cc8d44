# SPDX-License-Identifier: Apache-2.0
"""Items *nothing_lost*: the cache rank is killed in the middle of steps, and nobody loses a token.

Requests decode together, each of at least twice its resident and recent tokens. In each repetition
the cache rank gets SIGKILL at a seeded moment within a step; the streams have to end with the
tokens of a run in which nothing was killed. *nothing_lost_message*: it is met by messages, and its
engine is killed. *nothing_lost_shards*: one of three that share the KV heads is.

*nothing_lost_gpu* and *nothing_lost_gpu_message* are the same between GPUs, in bfloat16 at the
defaults of ``serve``, with prompts of about 16K: two GPUs, by messages under CUDA MPS, and a model
for 17K tokens at least in ``TANDEMKV_TEST_MODEL``. They run if they are named.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from typing import Any

from exactness import flush
from rank_servers import Server, ours
from workbench import Bench, Checks, long_ids

from tandemkv.cache_rank.protocol.ipc import server_pid
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server.launch.message_launch import FAR_FOLDER

SELECTION = {
    "policy": "look_ahead",
    "budget_tokens": 32,
    "resident_factor": 1.0,
    "num_recent_tokens": 16,
    "num_sink_tokens": 4,
    "fetch_cap": 8,
}
SHORTEST, LONGEST = 120, 240  # resident and recent tokens are 52
BLOCKER_TOKENS = 1500
NEW_TOKENS = 24
LIMITS_S = {
    "cold": 12.0, "standby": 3.0, "message": 12.0, "message_standby": 6.0, "shards": 12.0,
    "gpu": 15.0, "gpu_standby": 3.0, "gpu_message": 15.0,
}  # fmt: skip
ANNOUNCED_US = {"announcement_p50_us": 25.0, "announcement_p99_us": 100.0}
"""From the announcement of a step to the launch of its graph between two GPUs, at most."""
_READY_S, _PROMPTS_S = 120.0, 400.0
_APART_S = 0.02


@dataclass(frozen=True)
class Load:
    """What a campaign asks, and of what server."""

    shortest: int = SHORTEST
    longest: int = LONGEST
    new_tokens: int = NEW_TOKENS
    letters: int = 120_000
    """Of the text that prompts are cut out of."""
    device: str = "cpu"
    settings: dict[str, Any] = field(default_factory=dict)


ON_GPU = Load(
    shortest=15_000, longest=16_000, new_tokens=400, letters=600_000, device="cuda",
    settings={
        "selection": {"dense_tokens": 0},
        "dtype": "bfloat16",
        "cache": {"capacity_tokens": 192 * 1024},
    },
)  # fmt: skip
"""Every request selects, though `serve` would attend densely to so little."""


@dataclass
class Stream:
    """What one client got: tokens, when each came, and the error if there was one."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""

    def longest_gap_s(self, since: float) -> float:
        """Longest time between two tokens, of those that came after `since`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=0.0)


def settings_of(*, num_requests: int, standby: bool, **more: Any) -> dict[str, Any]:
    """Settings of a server for `num_requests` at once."""
    return {
        "selection": SELECTION,
        "max_running_requests": num_requests + 2,
        "standby": standby,
        "max_restarts": 1000,
    } | more


def make_prompts(num_requests: int, seed: int = 11, load: Load = Load()) -> list[list[int]]:
    """Unrelated pieces of a text."""
    ids, rng = long_ids(load.letters), random.Random(seed)
    lengths = [rng.randrange(load.shortest, load.longest) for _ in range(num_requests)]
    starts = [rng.randrange(len(ids) - load.longest) for _ in range(num_requests)]
    return [ids[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def read(
    server: Server, prompt: list[int], new_tokens: int, stream: Stream, **sampling: Any
) -> None:
    """Follow one greedy stream to its end."""
    body = {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {
            "max_new_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **sampling,
        },
    }
    request = urllib.request.Request(
        server.url + "/generate", json.dumps(body).encode(), server.headers
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            stream.error = "cut"
            for line in reply:
                text = line.decode().removeprefix("data: ").strip()
                if text == "[DONE]":
                    stream.error = ""
                if not text or text == "[DONE]":
                    continue
                found = json.loads(text)
                if "error" in found:
                    stream.error = str(found["error"])
                    return
                reason = found["meta_info"]["finish_reason"] or {}
                if reason.get("type") == "abort":  # how this route ends a stream that had begun
                    stream.error = f"{reason['status_code']}: {reason['message']}"
                    return
                stream.tokens = list(found["output_ids"])
                stream.times.append(time.monotonic())
    except (OSError, HTTPException) as error:
        stream.error = repr(error)


def begin(
    pool: ThreadPoolExecutor, server: Server, prompts: Sequence[list[int]], new_tokens: int
) -> tuple[list[Stream], list[Future[None]]]:
    """Start a stream for each prompt, so that they are batched in the same way each time.

    In float32 sums depend on how many requests are computed together. So all of them wait behind
    another prompt, and are taken in their order when that is through.
    """
    streams = [Stream() for _ in prompts]
    steps = values(server)["extend_steps_total"]
    blocker = pool.submit(read, server, long_ids()[-BLOCKER_TOKENS:], 1, Stream())
    wait_for(lambda: values(server)["extend_steps_total"] > steps, "no prompt begins", 60.0, 0.01)
    futures = []
    for prompt, stream in zip(prompts, streams, strict=True):
        futures.append(pool.submit(read, server, prompt, new_tokens, stream))
        time.sleep(_APART_S)
    return streams, [*futures, blocker]


def values(server: Server) -> dict[str, float]:
    """Counters of the inference rank; the cache rank may be away."""
    found: dict[str, float] = server.get("/tandemkv/status")[1]["inference_rank"]["values"]
    return found


def serving_pid(server: Server) -> int:
    """Process id of the cache rank that serves, not of one that waits."""
    status = server.get("/tandemkv/status")[1]
    return int(status["cache_ranks"][0]["info"]["pid"])


def cache_ranks(server: Server) -> list[dict[str, Any]]:
    """Status of each cache rank, in order."""
    found: list[dict[str, Any]] = server.get("/tandemkv/status")[1]["cache_ranks"]
    return found


def fetched_rows(server: Server) -> float:
    """Rows that all cache ranks have fetched since they began."""
    return sum(float(rank["values"]["fetched_rows_total"]) for rank in cache_ranks(server))


def pids(server: Server) -> list[int]:
    """Process id of each cache rank that serves, in order; behind pumps that of the engine."""
    assert server.run_dir is not None
    far = server.run_dir / FAR_FOLDER
    if far.is_dir():
        folders = sorted(far.iterdir())
        return [server_pid(RunDir.open(path).heartbeat_socket) or 0 for path in folders]
    return [int(rank["info"]["pid"]) for rank in cache_ranks(server)]


def wait_for(
    condition: Any, complaint: str, timeout_s: float = _READY_S, pause_s: float = 0.05
) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(KeyError, OSError, HTTPException):
            if condition():
                return
        if time.monotonic() > deadline:
            raise AssertionError(complaint)
        time.sleep(pause_s)


def undisturbed(server: Server, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """Tokens of a run in which nothing is killed."""
    flush(server)
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        streams, futures = begin(pool, server, prompts, new_tokens)
        for future in futures:
            future.result()
    errors = [stream.error for stream in streams if stream.error]
    if errors:
        raise AssertionError(errors[0])
    return [stream.tokens for stream in streams]


def killed_while_decoding(
    server: Server, prompts: Sequence[list[int]], want: list[list[int]], *, pid: int,
    begin_within_s: float = 60.0,
) -> dict[str, float]:  # fmt: skip
    """Kill `pid` once all of `prompts` decode; returns by how much each value has grown then.

    Fails unless every request ends with the tokens in `want`, and nothing is left.
    """
    flush(server)
    before = values(server)
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        streams, futures = begin(pool, server, prompts, len(want[0]))
        wait_for(
            lambda: all(s.tokens for s in streams), "requests do not begin", begin_within_s, 0.01
        )
        assert not any(future.done() for future in futures[:-1])
        os.kill(pid, signal.SIGKILL)
        for future in futures:
            future.result()
    assert [stream.error for stream in streams] == [""] * len(prompts)
    assert [stream.tokens for stream in streams] == want
    after = values(server)
    wait_for(lambda: values(server)["request_rows"] == 0, "rows are left", 30.0)
    flush(server)
    assert values(server)["slots_used"] == 0
    return {name: value - before[name] for name, value in after.items() if name in before}


def killed_while_prompts_are_computed(
    server: Server, prompts: Sequence[list[int]], want: Sequence[list[int]]
) -> None:
    """Kill the cache rank in the middle of prompts; fails unless the tokens in `want` come."""
    flush(server)
    wait_for(lambda: waiting_ranks(server) > 0, "no cache rank waits")
    before = values(server)
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        streams, futures = begin(pool, server, prompts, len(want[0]))
        wait_for(
            lambda: values(server)["extend_steps_total"] > before["extend_steps_total"] + 1,
            "no prompt begins",
        )
        os.kill(serving_pid(server), signal.SIGKILL)
        for future in futures:
            future.result()
    assert [stream.error for stream in streams] == [""] * len(prompts)
    assert [stream.tokens for stream in streams] == want
    assert values(server)["pauses_total"] > before["pauses_total"]


def repeat(
    server: Server,
    prompts: Sequence[list[int]],
    want: Sequence[list[int]],
    new_tokens: int,
    rng: random.Random,
) -> dict[str, Any]:
    """One repetition: kill while all decode; see what came of it, and what is left."""
    flush(server)
    before, pid = values(server), rng.choice(pids(server))
    assert pid > 0, "no cache rank serves"
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        streams, futures = begin(pool, server, prompts, new_tokens)
        first = rng.randrange(2, max(3, new_tokens // 2))
        wait_for(
            lambda: all(len(stream.tokens) > first for stream in streams),
            "requests do not decode",
            _PROMPTS_S,
            0.002,
        )
        times = streams[0].times
        step_s = (times[-1] - times[0]) / max(1, len(streams[0].tokens) - 1)
        moment = rng.random()
        time.sleep(moment * step_s)
        in_flight = sum(not future.done() for future in futures[:-1])
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        for future in futures:
            future.result()
    wait_for(lambda: values(server)["request_rows"] == 0, "rows are left", 30.0)
    after = values(server)
    names = ("rewound_rows_total", "restored_rows_total", "reseeded_rows_total", "pauses_total")
    same = [stream.tokens == tokens for stream, tokens in zip(streams, want, strict=True)]
    flush(server)
    found = {
        "in_flight": in_flight,
        "ended": sum(not stream.error for stream in streams),
        "same_tokens": sum(same),
        "moment_in_step": round(moment, 3),
        "step_s": round(step_s, 3),
        "longest_gap_s": round(max(stream.longest_gap_s(killed) for stream in streams), 3),
        "rows_left": values(server)["request_rows"],
        "slots_left": values(server)["slots_used"],
    } | {name.removesuffix("_total"): after[name] - before[name] for name in names}
    wait_for(lambda: all(pids(server)), "no cache rank comes back")
    return found


def campaign(
    *, num_requests: int, repetitions: int, standby: bool, seed: int, load: Load = Load(),
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Run the repetitions on one server, with `more` settings; look at what it leaves."""
    prompts, rng = make_prompts(num_requests, load=load), random.Random(seed)
    new_tokens, given = load.new_tokens, load.settings | more
    settings = settings_of(num_requests=num_requests, standby=standby, **given)
    with ours(settings, device=load.device) as server:
        want = undisturbed(server, prompts, new_tokens)
        is_stable = undisturbed(server, prompts, new_tokens) == want
        reported = cache_ranks(server)[0]["values"].items()
        announcements = {k: v for k, v in reported if k.startswith("announcement_")}
        rows = []
        for _ in range(repetitions):
            if standby:
                wait_for(lambda: waiting_ranks(server) > 0, "no cache rank waits")
            rows.append(repeat(server, prompts, want, new_tokens, rng))
        longest_ms = values(server)["longest_pause_ms"]
        processes, run_dir = server.processes(), server.run_dir
    left = [process.pid for process in processes if process.is_running()]
    assert run_dir is not None
    files = [path.name for path in run_dir.iterdir() if path.suffix != ".log"]
    return {
        "is_stable": is_stable,
        "longest_pause_s": longest_ms / 1e3,
        "announcements": announcements,
        "repetitions": rows,
        "processes_left": len(left),
        "files_left": files,
    }


def waiting_ranks(server: Server) -> int:
    """Cache ranks that are loaded and wait to take the place of the one that serves."""
    assert server.run_dir is not None
    (serving,), found, far = pids(server), 0, server.run_dir / FAR_FOLDER
    for name in ("cache_rank.log", "standby.log"):
        path = (far if far.is_dir() else server.run_dir) / name
        if path.exists():
            lines = [line for line in path.read_text().splitlines() if "tandemkv" in line]
            found += bool(lines) and f"process {serving} serves" in lines[-1]
    return found


def judge(checks: Checks, name: str, found: list[dict[str, Any]], num_requests: int) -> None:
    """Compare campaigns with what is promised."""
    rows, limit = [row for each in found for row in each["repetitions"]], LIMITS_S[name]
    whole = len(rows) * num_requests
    stable = all(each["is_stable"] for each in found)
    checks.add(f"{name}: undisturbed runs agree with each other", stable, "true", stable)
    for key, label in (
        ("in_flight", "in flight when it is killed"),
        ("ended", "end without an error"),
        ("same_tokens", "with the tokens of an undisturbed run"),
    ):
        total = sum(row[key] for row in rows)
        checks.add(f"{name}: requests {label}", total, f"{whole}", total == whole)
    gap = max(row["longest_gap_s"] for row in rows)
    checks.add(f"{name}: longest pause of a stream, s", gap, f"<= {limit:g}", gap <= limit)
    left = sum(row["rows_left"] + row["slots_left"] for row in rows)
    checks.add(f"{name}: rows and slots left", left, "0", left == 0)
    left = sum(each["processes_left"] + len(each["files_left"]) for each in found)
    checks.add(f"{name}: processes and files left", left, "0", left == 0)
    for key, limit in ANNOUNCED_US.items() if name in ("gpu", "gpu_standby") else ():
        longest = max(each["announcements"][key] for each in found)
        checks.add(f"{name}: {key}", longest, f"<= {limit:g}", longest <= limit)
    seeded = sum(row["reseeded_rows"] for row in rows)
    checks.add(f"{name}: resident sets seeded anew", seeded, "0", seeded == 0)


def _run(
    bench: Bench, item: str, names: Sequence[str], *, num_requests: int, **more: Any
) -> dict[str, Any]:
    """Run a campaign for each of `names`, whose places are the seeds."""
    tasks = {
        f"{name} {seed}": partial(
            campaign, num_requests=num_requests, standby="standby" in name, seed=seed, **more
        )
        for seed, name in enumerate(names)
    }
    found, checks = bench.run(item, tasks), Checks()
    for name in dict.fromkeys(names):
        campaigns = [found[task] for task in tasks if task.rpartition(" ")[0] == name]
        judge(checks, name, campaigns, num_requests)
    return checks.result(rows=found)


def run(bench: Bench) -> dict[str, Any]:
    """32 requests, 20 repetitions with a standby cache rank, and 4 without."""
    names = [*["standby"] * 5, "cold"]
    return _run(bench, "nothing_lost", names, num_requests=32, repetitions=4)


def run_message(bench: Bench) -> dict[str, Any]:
    """16 requests, both ends of link ``message`` on this host; 5 repetitions, 5 with a standby."""
    given: dict[str, Any] = {"num_requests": 16, "repetitions": 5, "transport": "message"}
    return _run(bench, "nothing_lost_message", ["message", "message_standby"], **given)


def run_shards(bench: Bench) -> dict[str, Any]:
    """16 requests, 10 repetitions; a cache rank for each of the model's KV heads."""
    given: dict[str, Any] = {"num_requests": 16, "repetitions": 5, "cache_ranks": 3}
    return _run(bench, "nothing_lost_shards", ["shards"] * 2, **given)


def run_gpu(bench: Bench) -> dict[str, Any]:
    """8 requests of 16K, 5 repetitions with a standby cache rank and 5 without; two GPUs."""
    given: dict[str, Any] = {"num_requests": 8, "repetitions": 5, "load": ON_GPU, "cache_ranks": 1}
    return _run(bench, "nothing_lost_gpu", ["gpu", "gpu_standby"], transport="shared", **given)


def run_gpu_message(bench: Bench) -> dict[str, Any]:
    """The same by messages between two GPUs, without a standby."""
    given: dict[str, Any] = {"num_requests": 8, "repetitions": 5, "load": ON_GPU}
    return _run(bench, "nothing_lost_gpu_message", ["gpu_message"], transport="message", **given)
