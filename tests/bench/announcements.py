# SPDX-License-Identifier: Apache-2.0
"""What a cache rank's host does between the announcement of a decode step and its start.

    python tests/bench/announcements.py --out announcements.json [--device cuda:0]

Both ends of a ring in one process, 8 requests, 3 ms between steps in which the reader looks for the
next one, as it does beside a model: what runs once a step is slower than what runs all the time.
``warm`` rows repeat one call, ``cold`` ones leave 3 ms between two. With `--device`, also what the
launch of a step takes: a kernel, a stream, a graph of 800 kernels.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import torch

from tandemkv.cache_rank.protocol import step_flags
from tandemkv.cache_rank.protocol.step_flags import WORDS_APART, StepFlags
from tandemkv.cache_rank.protocol.step_ring import (
    EntryKind,
    StepEntry,
    StepRing,
    StepRow,
    ring_shape,
)

STEPS, BETWEEN_S, REQUESTS = 300, 0.003, 8
FUTEX = step_flags._SYSCALLS[platform.machine()]


def row(figure: str, found_ns: list[int]) -> dict[str, Any]:
    """Return a row of a report."""
    us = sorted(each / 1000 for each in found_ns)
    tenth = len(us) // 10
    return {
        "figure": figure, "value": statistics.median(us), "unit": "us", "p10": us[tenth],
        "p90": us[-tenth - 1], "n": len(us),
    }  # fmt: skip


def ring() -> list[dict[str, Any]]:
    """Return how long writing, seeing and reading an announcement takes."""
    words = torch.zeros(ring_shape(64), dtype=torch.int64)
    flags = StepFlags(torch.zeros((2, WORDS_APART), dtype=torch.int64))
    writer, reader, never = StepRing(words, flags), StepRing(words, flags), Event().is_set
    rows = tuple(
        StepRow(row=n + 1, generation=3, length=16000, prefix_len=15999) for n in range(REQUESTS)
    )
    found: list[tuple[int, int, int]] = []
    for step in range(1, STEPS + 1):
        awake = time.monotonic() + 1
        reader.read(timeout_s=BETWEEN_S, is_over=never, awake_until=awake)
        begin = time.monotonic_ns()
        entry = StepEntry(kind=EntryKind.DECODE, step=step, rows=rows)
        writer.write(entry, timeout_s=1, is_over=never)
        written = time.monotonic_ns()
        read = reader.read(timeout_s=1, is_over=never, awake_until=awake)
        end = time.monotonic_ns()
        assert read is not None
        found.append((written - begin, read.seen_ns - written, end - read.seen_ns))
    names = ("announcement_written_us", "announcement_seen_us", "announcement_read_us")
    columns = zip(*found, strict=True)
    return [row(name, list(each)) for name, each in zip(names, columns, strict=True)]


def calls(device: torch.device | None) -> dict[str, Callable[[], object]]:
    """Return what is timed alone, by name."""
    libc, word = ctypes.CDLL(None), (ctypes.c_long * 8)()
    address = ctypes.c_void_p(ctypes.addressof(word))
    found: dict[str, Callable[[], object]] = {
        "system_call": lambda: libc.syscall(FUTEX, address, 1, 1, None, None, 0),
        "yield": os.sched_yield,
    }
    if device is not None:
        number, stream = torch.zeros(1, device=device), torch.cuda.Stream(device)

        def enter() -> None:
            with torch.cuda.stream(stream):
                pass

        graph = torch.cuda.CUDAGraph()
        number += 1
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph):
            for _ in range(800):
                number += 1
        found |= {"kernel": lambda: number.fill_(3), "enter_stream": enter, "graph": graph.replay}
    return found


def timed(call: Callable[[], object], between_s: float) -> list[int]:
    """Return how long each of many calls takes, with a wait that keeps the core between them."""
    found = []
    for _ in range(STEPS):
        end = time.monotonic() + between_s
        while time.monotonic() < end:
            os.sched_yield()
        begin = time.monotonic_ns()
        call()
        found.append(time.monotonic_ns() - begin)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the next calls are not behind these
    return found


def main() -> None:
    """Print rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", type=torch.device)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.device is not None:
        torch.cuda.set_device(arguments.device)
    rows = ring()
    for name, call in calls(arguments.device).items():
        if name != "graph":  # so many of them fill what the host may queue
            rows.append(row(f"{name}_warm_us", timed(call, 0.0)))
        rows.append(row(f"{name}_cold_us", timed(call, BETWEEN_S)))
    for each in rows:
        print(f"{each['figure']}: {each['value']:.1f} us ({each['p10']:.1f} to {each['p90']:.1f})")
    arguments.out.write_text(json.dumps({"benchmark": "announcements", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
