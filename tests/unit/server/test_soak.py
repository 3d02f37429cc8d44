# SPDX-License-Identifier: Apache-2.0
"""Requests, endings, windows, slopes and verdicts of ``tandemkv soak``."""

from __future__ import annotations

import dataclasses
import http.client
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from soak_world import send_events, send_json, serving

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.fault_points import parse_faults
from tandemkv.server.soak import client as client_module
from tandemkv.server.soak import faults as faults_module
from tandemkv.server.soak import processes as processes_module
from tandemkv.server.soak import run as run_module
from tandemkv.server.soak.canaries import Solo, compare, record_solo
from tandemkv.server.soak.client import Client, Outcome
from tandemkv.server.soak.command import SoakRequest
from tandemkv.server.soak.faults import Chaos, Fault, parse_actions, points_text
from tandemkv.server.soak.judge import judge
from tandemkv.server.soak.processes import (
    CACHE_RANK,
    HTTP,
    SCHEDULER,
    Held,
    ProcessGauges,
    ServerProcesses,
)
from tandemkv.server.soak.report import as_json, as_tables
from tandemkv.server.soak.requests import BAD_REQUESTS, Load, Request
from tandemkv.server.soak.run import Findings, QuietPoint, dense_rule
from tandemkv.server.soak.slope import slope_of
from tandemkv.server.soak.target import Target
from tandemkv.server.soak.watch import Restart, Watch
from tandemkv.server.soak.windows import Windows

CHUNK = {"choices": [{"index": 0, "text": "x"}]}
STREAM = Request(kind="stream", path="/v1/completions", body={"stream": True})


def without(body: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


def load() -> Load:
    return Load(1, canaries=6, longest_tokens=200)


def test_a_seed_gives_the_same_requests_and_all_kinds_come() -> None:
    drawn = [load().draw(number) for number in range(300)]
    again = [load().draw(number) for number in range(300)]
    salted = {"cache_salt"}  # of canaries, new each time
    assert [without(r.body, salted) for r in drawn] == [without(r.body, salted) for r in again]
    assert {r.kind for r in drawn} == {
        "short", "long", "stream", "chat", "several", "logprobs", "hang up", "bad", "canary",
    }  # fmt: skip
    codes = [r.code for r in drawn if r.code and r.canary is None]
    assert len(set(codes)) == len(codes)
    assert all(len(code) == 9 for code in codes)
    assert Load(2, canaries=6, longest_tokens=200).draw(0).body != load().draw(0).body


def test_canaries_are_the_same_prompts_whenever_they_come() -> None:
    first, again = load().canary(1), load().canary(1, stream=True)
    assert first.body["prompt"] == again.body["prompt"]
    assert first.code in str(first.body["prompt"])
    assert load().canary(2).body["cache_salt"] != load().canary(2).body["cache_salt"]


def outcome_of(answer: Any, request: Request = STREAM) -> Outcome:
    with serving(answer) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "_SILENCE_S", 1.0)
        return Client(url).send(request)


def test_a_whole_stream_is_complete_and_its_times_are_known() -> None:
    found = outcome_of(lambda handler, _: send_events(handler, [CHUNK] * 3, is_whole=True))
    assert (found.ending, found.status, found.text) == ("complete", 200, "xxx")
    assert found.first_s is not None
    assert len(found.gaps_s) == 3


def test_a_stream_without_its_end_is_cut_and_an_error_event_is_clear() -> None:
    cut = outcome_of(lambda handler, _: send_events(handler, [CHUNK], is_whole=False))
    assert cut.ending == "cut"
    error = {"error": {"message": "the cache rank was lost", "code": 503}}
    clear = outcome_of(lambda handler, _: send_events(handler, [CHUNK, error], is_whole=True))
    assert (clear.ending, clear.status) == ("error event", 503)


def test_other_endings() -> None:
    refused = outcome_of(lambda h, _: send_json(h, 503, {}, {"retry-after": "5"}))
    assert (refused.ending, refused.status, refused.retry_after) == ("complete", 503, True)
    late = outcome_of(lambda *_: time.sleep(1.5))
    assert late.ending == "timeout"
    reset = outcome_of(lambda handler, _: handler.connection.close())
    assert reset.ending == "cut"
    assert Client("http://127.0.0.1:9").send(STREAM).ending == "unreachable"
    hang_up = Request(kind="hang up", path="/x", body={"stream": True}, hang_up_after=2)
    left = outcome_of(lambda h, _: send_events(h, [CHUNK] * 50, is_whole=True), hang_up)
    assert (left.ending, left.text) == ("hung up", "xx")


def test_canaries_are_compared_up_to_the_first_uncertain_token() -> None:
    def answer(handler: Any, body: dict[str, Any]) -> None:
        assert body["logprobs"] == 2
        best = [{" a": -0.1, " b": -3.0}, {" c": -0.7, " d": -0.75}, {" e": -0.1, " f": -3.0}]
        logprobs = {"tokens": [" a", " c", " e"], "top_logprobs": best}
        choices = [{"index": 0, "text": " a c e", "logprobs": logprobs}]
        send_json(handler, 200, {"choices": choices, "usage": {"total_tokens": 30}})

    with serving(answer) as url:
        solos = record_solo(Client(url), load(), 3, lambda tokens: tokens < 40)
    assert solos == [Solo(text=" a", num_tokens=1, is_dense=True)] * 3
    same, other = ended("complete", text=" a d", canary=0), ended("complete", text=" b", canary=1)
    found = compare([same, other, ended("cut", text="", canary=2)], solos)
    assert (found["dense"].answered, found["dense"].differ) == (2, 1)
    assert found["sparse"].answered == 0


def test_what_is_dense_is_what_the_server_says() -> None:
    rank = {"values": {"plan_dense_tokens": 100.0}, "info": {"policy": "look_ahead"}}
    rule = dense_rule({"inference_rank": rank})
    assert (rule(100), rule(101)) == (True, False)
    assert dense_rule({"inference_rank": {"info": {"policy": "exact"}}})(10**6)


def ended(
    ending: Any, *, status: int = 200, at: float = 100.0, text: str = "", kind: Any = "short",
    canary: int | None = None, refusals: frozenset[int] = frozenset(), retry_after: bool = False,
    code: str = "",
) -> Outcome:  # fmt: skip
    request = Request(kind=kind, path="/x", canary=canary, refusals=refusals, code=code)
    return Outcome(
        request=request, started=at, ended=at + 1.0, status=status, ending=ending, text=text,
        retry_after=retry_after,
    )  # fmt: skip


def fault(action: Any, target: str, *, recovery_s: float | None = 5.0) -> Fault:
    return Fault(action=action, target=target, began=100.0, ended=110.0, recovery_s=recovery_s)


@pytest.mark.parametrize(
    ("outcome", "calm", "beside"),
    [
        (ended("complete"), "answered", "answered"),
        (ended("timeout"), "lost", "lost"),
        (ended("cut"), "lost", "lost"),
        (ended("unreachable", status=0), "lost", "unreachable"),
        (ended("complete", status=500), "wrong status", "wrong status"),
        (
            ended("complete", status=503, retry_after=True),
            "HTTP 5xx outside of faults",
            "refused with 503",
        ),
        (ended("complete", status=503), "HTTP 5xx outside of faults", "wrong status"),
        (ended("error event", status=503), "HTTP 5xx outside of faults", "ended with 503"),
        (ended("complete", status=429), "busy", "busy"),
        (ended("complete", status=400, refusals=frozenset({400})), "refused", "refused"),
        (ended("complete", refusals=frozenset({400})), "wrong status", "wrong status"),
    ],
)
def test_an_ending_is_judged_by_the_faults_beside_it(
    outcome: Outcome, calm: str, beside: str
) -> None:
    assert Windows().ending_of(outcome) == calm
    assert Windows([fault("kill", CACHE_RANK)], []).ending_of(outcome) == beside


def test_connections_may_be_cut_only_where_the_http_process_is_killed() -> None:
    cut = ended("cut")
    for action, target, allowed in (
        ("kill", HTTP, True), ("stop", SCHEDULER, True), ("kill", SCHEDULER, False),
        ("pause", HTTP, False), ("stop", CACHE_RANK, False),
    ):  # fmt: skip
        windows = Windows([fault(action, target)], [])
        assert windows.ending_of(cut) == ("cut" if allowed else "lost"), (action, target)
    # Who connects while the process ends, of itself, gets no answer; one that has begun is whole.
    windows = Windows([fault("kill", SCHEDULER)], [])
    assert windows.ending_of(ended("cut", status=0)) == "cut"


def test_a_loss_of_the_cache_rank_is_told_from_one_of_sglang() -> None:
    lost = ended("error event", status=503)
    assert Windows([fault("kill", CACHE_RANK)], []).is_loss_of_cache_rank(lost)
    assert not Windows([fault("kill", SCHEDULER)], []).is_loss_of_cache_rank(lost)
    line = {"time": 99.0, "point": "ring.write", "role": "inference_rank", "action": "drop"}
    assert Windows([], [line]).is_loss_of_cache_rank(lost)
    assert not Windows([], [line | {"action": "kill"}]).is_loss_of_cache_rank(lost)
    assert Windows([], [line | {"action": "stop"}]).ending_of(ended("cut")) == "cut"
    assert Windows([], [line | {"action": "delay"}]).ending_of(ended("cut")) == "lost"


def test_a_slope_is_told_from_noise() -> None:
    rng = random.Random(3)
    times = [float(10 * index) for index in range(300)]
    flat = [1.0 + rng.gauss(0, 0.2) for _ in times]
    rising = [1.0 + time / 3000 + rng.gauss(0, 0.2) for time in times]
    calm, grown = slope_of(times, flat), slope_of(times, rising)
    assert calm is not None
    assert grown is not None
    assert calm.is_within_noise
    assert not grown.is_within_noise
    assert grown.per_hour == pytest.approx(1.2, abs=0.3)
    load = [float(time > 1500) for time in times]
    shifted = [value + 3.0 * other for value, other in zip(flat, load, strict=True)]
    with_load = slope_of(times, shifted, beside=load)
    assert with_load is not None
    assert with_load.is_within_noise
    assert slope_of(times[:5], flat[:5]) is None


def test_faults_are_parsed_and_points_are_those_that_there_are() -> None:
    assert parse_actions("drop, kill") == ("kill", "drop")
    assert parse_actions("none") == ()
    with pytest.raises(SettingsError, match="explode: there are kill, stop, pause, delay, drop"):
        parse_actions("kill,explode")
    assert points_text(1, ("kill",)) == ""
    seed, rules = parse_faults(points_text(7, ("delay", "drop")))
    assert seed == 7
    assert {rule.action for rule in rules} == {"delay", "drop"}


def test_chaos_kills_continues_what_it_pauses_and_waits_for_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    ranks = {CACHE_RANK: start()}

    def pids() -> dict[str, int]:
        if ranks[CACHE_RANK].poll() is not None:
            ranks[CACHE_RANK] = start()
        return {CACHE_RANK: ranks[CACHE_RANK].pid}

    processes: Any = SimpleNamespace(pids=pids)
    monkeypatch.setattr(faults_module, "_LONGEST_PAUSE_S", 0.4)
    first = ranks[CACHE_RANK]
    chaos = Chaos(
        seed=5, actions=("kill", "pause"), processes=processes, is_ready=lambda: True, calm_s=0.1
    )
    try:
        chaos.start()
        while {each.action for each in chaos.faults if each.ended} != {"kill", "pause"}:
            time.sleep(0.1)
        chaos.stop()
        assert first.wait(5) == -signal.SIGKILL
        assert all(each.recovery_s is not None for each in chaos.faults if each.ended)
        assert psutil.Process(ranks[CACHE_RANK].pid).status() != psutil.STATUS_STOPPED
    finally:
        ranks[CACHE_RANK].kill()


def test_chaos_that_is_left_in_a_pause_lets_the_process_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After Ctrl-C nobody else would: a server of another launcher would hang."""
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    processes: Any = SimpleNamespace(pids=lambda: {CACHE_RANK: rank.pid})
    monkeypatch.setattr(faults_module, "_SHORTEST_PAUSE_S", 300.0)
    monkeypatch.setattr(faults_module, "_LONGEST_PAUSE_S", 301.0)
    chaos = Chaos(
        seed=5, actions=("pause",), processes=processes, is_ready=lambda: False, calm_s=0.01
    )
    try:
        chaos.start()
        while psutil.Process(rank.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        chaos.leave()
        assert psutil.Process(rank.pid).status() != psutil.STATUS_STOPPED
    finally:
        rank.kill()


def held(*, fds: int = 20, files: tuple[str, ...] = (), segments: int = 1) -> Held:
    gauges = ProcessGauges(pid=1, fds=fds, threads=5, rss_mib=100.0, private_mib=50.0)
    return Held(
        time=0.0,
        roles={"launcher": (gauges,)},
        run_dir_files=("token", *files),
        shared_memory=tuple(f"/dev/shm/{i}" for i in range(segments)),
    )


def findings(outcomes: list[Outcome], *, last: Held, rows: int = 0, **rules: Any) -> Findings:
    asked = SoakRequest(ctx=None, duration_s=60, faults="stop,kill", **rules)  # type: ignore[arg-type]
    solo = Solo(text=" a", num_tokens=1, is_dense=True)
    good = ended("complete", text=" a", canary=0)
    return Findings(
        asked=asked,
        began=0.0,
        ended=60.0,
        solos=[solo],
        solos_after=[solo],
        outcomes=[good, *outcomes],
        quiet=[
            QuietPoint(
                held=each,
                books={"request_rows": n, "slots_used": 0, "sglang_tokens": 0},
                is_flushed=True,
            )
            for each, n in ((held(), 0), (last, rows))
        ],
        watch=Watch("http://127.0.0.1:9", None),
    )


def failed(found: Findings, **target: Any) -> list[str]:
    server = Target(
        url="http://x", client=Client("http://x"), processes=None, is_ours=bool(target),
        left=target.get("left"), exit_status=target.get("exit_status"),
    )  # fmt: skip
    verdict = judge(found, server)
    report = as_json(found, verdict, "a test")
    assert report["passed"] is verdict.passed
    assert report["settings"] == {
        "duration_s": 60, "seed": 1, "concurrency": 4, "actions": ("kill", "stop"), "calm_s": 45.0,
        "longest_tokens": 600,
    }  # fmt: skip
    assert report["rules"] == {
        "ready_within_s": 60.0, "refused_within_s": 1.0, "expect_no_loss": False,
    }  # fmt: skip
    as_tables(report)
    return [check.name for check in verdict.checks if not check.passed]


def test_a_server_that_is_as_it_was_passes() -> None:
    assert failed(findings([], last=held(fds=30)), left=[], exit_status="exit code 0") == []


def test_each_leak_and_each_wrong_answer_fails() -> None:
    assert failed(findings([], last=held(fds=40))) == ["growth of fds, largest of a process"]
    assert failed(findings([], last=held(segments=2))) == ["growth of shared memory, segments"]
    assert failed(findings([], last=held(files=("core",)))) == [
        "files in the run directory that came"
    ]
    assert failed(findings([], last=held(), rows=1)) == ["request_rows at the end"]
    assert failed(findings([], last=held()), left=["process 7"], exit_status="exit code 0") == [
        "left behind by the server that was ended"
    ]
    assert failed(findings([], last=held()), left=[], exit_status="signal SIGKILL") == [
        "end of the server"
    ]
    assert failed(findings([ended("timeout")], last=held())) == ["requests: lost"]
    assert failed(findings([ended("complete", text=" b", canary=0)], last=held())) == [
        "canaries that differ from their solo answer"
    ]
    mine, other = ended("complete", code="1" * 9), ended("complete", code="2" * 9, text="1" * 9)
    assert failed(findings([mine, other], last=held())) == [
        "answers with the code of another request"
    ]


def test_a_server_whose_processes_were_gone_is_judged_all_the_same() -> None:
    found = findings([], last=held())
    found.quiet[0].held = dataclasses.replace(held(), roles={})
    assert failed(found) == [
        "growth of fds, largest of a process", "growth of threads, largest of a process",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("times_s", "allowed_s", "passes"),
    [((0.2, 0.9, 1.0), 1.0, True), ((0.2, 0.9, 1.1), 1.0, False), ((0.2, 0.9, 1.1), 2.0, True)],
)
def test_bad_requests_are_to_be_refused_in_time(
    times_s: tuple[float, ...], allowed_s: float, passes: bool
) -> None:
    bad = [ended("complete", status=400, refusals=frozenset({400})) for _ in times_s]
    for outcome, time_s in zip(bad, times_s, strict=True):
        outcome.ended = outcome.started + time_s
    server = Target(url="http://x", client=Client("http://x"), processes=None, is_ours=False)
    verdict = judge(findings(bad, last=held(), refused_within_s=allowed_s), server)
    (found,) = [check for check in verdict.checks if check.name.startswith("bad requests")]
    assert found.value == max(times_s)
    assert found.passed == passes
    assert found.required == f"at most {allowed_s:g}"


def test_a_restart_without_a_fault_fails() -> None:
    found = findings([], last=held())
    found.watch.restarts.append(Restart(50.0, SCHEDULER))
    assert failed(found) == ["restarts that no fault explains"]


def test_a_watch_that_broke_off_fails() -> None:
    """Restarts that it did not see would count as none."""

    class Broken:
        def pids(self) -> dict[str, int]:
            raise FileNotFoundError("a folder is gone")

    found = findings([], last=held())
    found.watch = Watch("http://127.0.0.1:9", Broken())  # type: ignore[arg-type]
    found.watch.start()
    while not found.watch.error:
        time.sleep(0.01)
    found.watch.stop()
    assert failed(found) == ["the server was watched to the end"]
    assert found.watch.error == "FileNotFoundError: a folder is gone"


def test_bad_requests_are_all_to_be_refused() -> None:
    assert all(request.refusals for request in BAD_REQUESTS)
    assert not any(request.code for request in BAD_REQUESTS)


def test_a_process_is_counted_as_what_it_is() -> None:
    processes = ServerProcesses(os.getpid(), None)
    assert next(p.pid for some in processes.by_role().values() for p in some) == os.getpid()
    gauges = next(iter(processes.held().roles.values()))[0]
    assert gauges.fds > 0
    assert gauges.private_mib <= gauges.rss_mib


def test_a_process_that_ends_while_it_is_looked_at_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that watches the server would end, and the rest of the soak be unseen."""

    def gone(pid: int) -> int:
        raise ProcessLookupError(pid)

    monkeypatch.setattr(processes_module.os, "getpgid", gone)
    assert ServerProcesses(os.getpid(), None).held().shared_memory == ()


def quiet_point(status: Any, client: Any, processes: Any) -> QuietPoint:
    found = findings([], last=held())
    found.quiet.clear()
    found.watch.is_ready = True
    server: Any = SimpleNamespace(
        url="http://x", client=client, processes=processes, segments=set()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "fetch_status", status)
        patch.setattr(run_module, "_LAG_S", 0.01)
        run_module._Run(server, load(), found, print)._quiet()
    (point,) = found.quiet
    return point


def test_an_answer_that_is_cut_does_not_end_the_soak() -> None:
    def status(url: str) -> dict[str, Any]:
        return {"inference_rank": {"values": {"request_rows": 0.0}}, "cache_ranks": []}

    class Cut:
        """Cuts the first answer to each question."""

        def __init__(self) -> None:
            self.asked: list[str] = []

        def ask(self, method: str, path: str, *, is_admin: bool = False) -> tuple[int, bytes]:
            self.asked.append(path)
            if self.asked.count(path) == 1:
                raise http.client.IncompleteRead(b"{", 9)
            return 200, b'{"loads": [{"num_used_tokens": 0}]}'

    client = Cut()
    point = quiet_point(status, client, None)
    assert client.asked == ["/flush_cache"] * 2 + ["/v1/loads"] * 2
    assert point.is_flushed
    assert point.books == {"request_rows": 0.0, "sglang_tokens": 0.0}


def test_what_is_held_is_looked_at_when_the_cache_rank_has_met_its_engine() -> None:
    """Between two epochs requests wait, the server is ready, and the rank has less open."""
    told = [
        (0.0, {"epoch": 0, "ready": True}),
        (1.0, {"ready": False, "error": "it starts"}),
        (1.0, {"epoch": 0, "ready": True}),  # the loss is not noticed yet
        (1.0, {"epoch": 2, "ready": True}),
    ]
    asked: list[str] = []

    def status(url: str) -> dict[str, Any]:
        asked.append(url)
        is_up, rank = told[len(asked) - 1]
        values = {"request_rows": 0.0, "cache_rank_up": is_up}
        return {"inference_rank": {"values": values}, "cache_ranks": [rank]}

    loads = 200, b'{"loads": [{"num_used_tokens": 0}]}'
    client = SimpleNamespace(ask=lambda *_, is_admin: loads)
    processes = SimpleNamespace(held=lambda: held(fds=85 if len(asked) == len(told) else 37))
    assert quiet_point(status, client, processes).held == held(fds=85)
