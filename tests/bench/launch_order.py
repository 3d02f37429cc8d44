# SPDX-License-Identifier: Apache-2.0
"""Which of both ranks launches a decode step's graph first, between two GPUs.

    python tests/bench/launch_order.py --out launch_order.json \
        -- --config 1+1-shared-served-channels64 --points 8x32k

Runs `tandemkv bench decode` with what follows ``--``. In each of its processes the writing of
announcements and the replay of CUDA graphs are timed by the host's monotonic clock, which they
share. The cache rank is in nobody's way where its launch has ended before SGLang's begins.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_FOLDER = "TANDEMKV_LAUNCH_ORDER"
_TIMED = "tandemkv.cache_rank.protocol.step_ring"
"""The module, which both ranks import, behind whose import calls are timed."""
_AT_START = """\
import launch_order
launch_order.time_this_process()
launch_order.start_as_before()
"""
_EVERY = 25


class Call(NamedTuple):
    """What was called, ``announced`` or ``launched``, and when it began and ended, ns."""

    what: str
    began: int
    ended: int


def main() -> None:
    """Run the benchmark, print rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("arguments", nargs="*", help="of tandemkv bench decode, after --")
    args = parser.parse_args()
    from tandemkv.server.cli.commands import app

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_AT_START, encoding="utf-8")
        paths = (folder, str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", ""))
        os.environ |= {_FOLDER: folder, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        app(["bench", "decode", *args.arguments], prog_name="tandemkv", standalone_mode=False)
        rows = rows_of([_calls(path) for path in Path(folder).glob("*.json")])
    for each in rows:
        print(json.dumps(each))
    args.out.write_text(json.dumps({"benchmark": "launch_order", "rows": rows}, indent=1))


def rows_of(processes: Sequence[Sequence[Call]]) -> list[dict[str, Any]]:
    """Return rows of a report, of the steps that two processes replayed.

    Raises `SystemExit` if there is none: no decode step was captured, or no cache rank was in a
    process of its own.
    """
    found = [
        (call, own, theirs)
        for calls in processes
        for number, call in enumerate(calls)
        if call.what == "announced"
        and (own := _next_launch(calls[number:], call.began))
        and (theirs := _next_launch(_others(processes, calls), call.began))
    ]
    if not found:
        raise SystemExit("no decode step was announced and replayed: run it between two GPUs")
    times = {
        "announcement_to_launch_us": [theirs.began - call.began for call, _, theirs in found],
        "announcement_to_launched_us": [theirs.ended - call.began for call, _, theirs in found],
        "announcement_to_sglangs_launch_us": [own.began - call.began for call, own, _ in found],
        "launched_before_sglangs_us": [own.began - theirs.ended for _, own, theirs in found],
    }
    return [_row(figure, times_ns) for figure, times_ns in times.items()]


def time_this_process() -> None:
    """Have the calls of this process timed, once it has imported `_TIMED`."""
    sys.meta_path.insert(0, _Finder())


def start_as_before() -> None:
    """Run the `sitecustomize` of this environment, in whose place this module was imported."""
    paths = [path for path in sys.path if path != os.environ[_FOLDER]]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        del path, target
        if fullname != _TIMED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_time(module: ModuleType) -> None:
            execute(module)
            _time(module)

        spec.loader.exec_module = execute_and_time  # type: ignore[method-assign]
        return spec


def _time(module: Any) -> None:
    import torch

    calls: list[Call] = []
    path = Path(os.environ[_FOLDER], f"{os.getpid()}.json")
    write, replay = module.StepRing.write, torch.cuda.CUDAGraph.replay

    def note(what: str, began: int) -> None:
        calls.append(Call(what, began, time.monotonic_ns()))
        if len(calls) % _EVERY == 0:
            path.write_text(json.dumps(calls), encoding="utf-8")

    def timed_write(ring: Any, entry: Any, **more: Any) -> None:
        began = time.monotonic_ns()
        write(ring, entry, **more)
        if entry.kind is module.EntryKind.DECODE:
            note("announced", began)

    def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
        began = time.monotonic_ns()
        replay(graph)
        note("launched", began)

    module.StepRing.write = timed_write
    torch.cuda.CUDAGraph.replay = timed_replay  # type: ignore[method-assign]


def _calls(path: Path) -> list[Call]:
    return [Call(*each) for each in json.loads(path.read_text(encoding="utf-8"))]


def _others(processes: Sequence[Sequence[Call]], own: Sequence[Call]) -> list[Call]:
    return [call for calls in processes if calls is not own for call in calls]


def _next_launch(calls: Sequence[Call], since: int) -> Call | None:
    later = [call for call in calls if call.what == "launched" and call.began >= since]
    return min(later, key=lambda call: call.began, default=None)


def _row(figure: str, times_ns: Sequence[int]) -> dict[str, Any]:
    us = sorted(each / 1000 for each in times_ns)
    tenth = len(us) // 10
    return {
        "figure": figure, "value": round(statistics.median(us), 1), "unit": "us",
        "p10": round(us[tenth], 1), "p90": round(us[-tenth - 1], 1), "least": round(us[0], 1),
        "most": round(us[-1], 1), "n": len(us),
    }  # fmt: skip


if __name__ == "__main__":
    main()
