# SPDX-License-Identifier: Apache-2.0
"""Item *life_cycle*: 200 requests, aborts, disconnects; nothing is left. And all listeners."""

from __future__ import annotations

from typing import Any

import life_cycle
import mapped_memory
import sockets
from rank_servers import Server, ours
from workbench import SMALL, SMALL_RESIDENT, Bench, Checks, long_ids

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
        files_before, mapped_before = _files(server), life_cycle.books(server)["mapped_bytes"]
        outcomes = life_cycle.storm(server, ids, count=REQUESTS, longest=900)
        idle_s = life_cycle.wait_idle(server, 60.0)
        killed_s = life_cycle.kill_client(server, body, lines=3)
        steps = life_cycle.steps_after_abort(server, body)
        idle = life_cycle.agreed_books(server)
        life_cycle.after_flush(server)
        flushed = life_cycle.agreed_books(server)
        sets = mapped_memory.resident_mismatches(server, ids[:700], num_resident=SMALL_RESIDENT)
        files_after = _files(server)
        found = sockets.listening(server)
        listeners = [x._asdict() | {"purpose": sockets.purpose(x, server)} for x in found]
        run_dir = server.run_dir
        log = server.log.read_text()
    assert run_dir is not None
    left = sorted(path.name for path in run_dir.iterdir() if path.suffix != ".log")
    served = {key: n for key, n in outcomes.items() if key not in ("full 200", "hang up")}
    checks.add(
        f"{REQUESTS} requests: answers other than 200",
        sum(n for key, n in served.items() if key != "abort 200"),
        "0",
        all(key == "abort 200" for key in served),
    )
    checks.add("seconds from killed client to freed row", killed_s, "< 5", killed_s < 5.0)
    checks.add("decode steps after an abort", steps, "<= 2", steps <= 2)
    checks.add("rows at idle", idle["request_rows"], "0", idle["request_rows"] == 0)
    checks.add(
        "slots at idle: our status, SGLang with its radix cache",
        [idle["slots_used"], idle["sglang_used_tokens"]],
        "equal",
        idle["slots_used"] == idle["sglang_used_tokens"],
    )
    checks.add(
        "slots after a flush: our status, SGLang",
        [flushed["slots_used"], flushed["sglang_used_tokens"]],
        "0, 0",
        flushed["slots_used"] == 0 == flushed["sglang_used_tokens"],
    )
    checks.add(
        "mapped bytes, before and after",
        [mapped_before, flushed["mapped_bytes"]],
        "equal",
        flushed["mapped_bytes"] == mapped_before > 0,
    )
    checks.add(
        f"resident K/V unlike the pool's, of {sets['compared']}",
        sets["mismatches"],
        "0",
        sets["mismatches"] == 0 < sets["compared"],
    )
    checks.add(
        "open files of all processes, before and after",
        [files_before, files_after],
        f"grown by {FD_SLACK} at most",
        files_after <= files_before + FD_SLACK,
    )
    unknown = [x for x in listeners if x["purpose"] is None]
    checks.add("listeners that are not local or not known", unknown, "none", not unknown)
    checks.add("left in the run directory, but for logs", left, "none", not left)
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
