# SPDX-License-Identifier: Apache-2.0
"""Item *life_cycle*: 200 requests, aborts, disconnects; nothing is left. And all listeners."""

from __future__ import annotations

from typing import Any

import life_cycle
import sockets
from rank_servers import Server, ours
from workbench import SMALL, Bench, Checks, long_ids

REQUESTS = 200
FD_SLACK = 8


def run(_bench: Bench) -> dict[str, Any]:
    """Everything on one server, whose resident set is far smaller than most prompts."""
    ids, checks = long_ids(), Checks()
    body = {
        "input_ids": ids[:300],
        "sampling_params": {"max_new_tokens": 500, "temperature": 0, "ignore_eos": True},
    }
    with ours({"selection": SMALL}) as server:
        life_cycle.storm(server, ids, count=8, longest=100, seed=1)  # opens what stays open
        files_before = _files(server)
        outcomes = life_cycle.storm(server, ids, count=REQUESTS, longest=900)
        idle_s = life_cycle.wait_idle(server, 60.0)
        killed_s = life_cycle.kill_client(server, body, lines=3)
        steps = life_cycle.steps_after_abort(server, body)
        idle = life_cycle.agreed_books(server)
        flushed = life_cycle.after_flush(server)
        flushed = life_cycle.agreed_books(server)
        files_after = _files(server)
        found = sockets.listening(server)
        listeners = [x._asdict() | {"purpose": sockets.purpose(x, server)} for x in found]
        log = server.log.read_text()
    served = {key: n for key, n in outcomes.items() if key not in ("full 200", "hang up")}
    checks.add(
        f"{REQUESTS} requests: answers other than 200",
        sum(n for key, n in served.items() if key != "abort 200"),
        "0",
        all(key == "abort 200" for key in served),
    )
    checks.add("seconds from killed client to freed row", killed_s, "< 5", killed_s < 5.0)
    checks.add("decode steps after an abort", steps, "<= 2", steps <= 2)
    checks.add("rows at idle", idle["cache_rows_live"], "0", idle["cache_rows_live"] == 0)
    checks.add(
        "slots at idle: cache rank, SGLang with its radix cache",
        [idle["cache_slots_live"], idle["sglang_used_tokens"]],
        "equal",
        idle["cache_slots_live"] == idle["sglang_used_tokens"],
    )
    checks.add(
        "slots after a flush: cache rank, SGLang",
        [flushed["cache_slots_live"], flushed["sglang_used_tokens"]],
        "0, 0",
        flushed["cache_slots_live"] == 0 == flushed["sglang_used_tokens"],
    )
    checks.add("stale reads", flushed["stale_reads"], "0", flushed["stale_reads"] == 0)
    checks.add(
        "open files of all processes, before and after",
        [files_before, files_after],
        f"grown by {FD_SLACK} at most",
        files_after <= files_before + FD_SLACK,
    )
    unknown = [x for x in listeners if x["purpose"] is None]
    checks.add("listeners that are not local or not known", unknown, "none", not unknown)
    checks.add("tracebacks shown", log.count("Traceback"), "0", "Traceback" not in log)
    return checks.result(
        outcomes=outcomes,
        seconds_to_idle=idle_s,
        books_at_idle=idle,
        books_after_flush=flushed,
        listeners=listeners,
    )


def _files(server: Server) -> int:
    return sum(process.num_fds() for process in server.processes())
