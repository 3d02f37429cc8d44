# SPDX-License-Identifier: Apache-2.0
"""Run what needs GPUs, as many jobs at once as there are GPUs: tests, acceptance, figures.

    python tests/acceptance/gpus.py --models MODELS --out OUT [--only kernels one-gpu] [--list]

The jobs are in gpus.yaml. They start in that order, or in that of --only; one for which too few
GPUs are free is overtaken by smaller ones. A job sees its own GPUs only, writes into OUT/NAME, and
its output is OUT/NAME/log.txt. Run again with the same OUT, it leaves out jobs that have passed: a
machine that was lost costs what ran on it just then. Exit code 1 if a job failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE = HERE / "gpus.yaml"
_POLL_S = 0.5
_END_S = 40.0
"""A server drains for 30 s at most."""


class Job(BaseModel):
    """One entry of the table: a command of bash, run in the root of the repository.

    It finds its folder in ``$OUT``, those of other jobs in ``$ALL/NAME``, and models in
    ``$MODELS``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    gpus: int = Field(default=1, ge=0)
    after: tuple[str, ...] = ()
    """Jobs that must have passed."""
    mps: bool = False
    """Whether a CUDA MPS daemon of its own runs beside it."""
    limit_s: float = Field(default=600, gt=0)
    env: dict[str, str] = {}


def read_jobs(path: Path = TABLE) -> dict[str, Job]:
    """Return the table. Raises pydantic's `ValidationError`, or `ValueError` for an unknown job."""
    jobs = TypeAdapter(dict[str, Job]).validate_python(yaml.safe_load(path.read_text()))
    for name, job in jobs.items():
        for other in job.after:
            if other not in list(jobs)[: list(jobs).index(name)]:
                raise ValueError(f"{name}: comes after {other}, which does not stand before it")
    return jobs


def with_needed(jobs: Mapping[str, Job], names: Sequence[str]) -> list[str]:
    """Return `names` in their order, each behind all that it comes after."""
    found: dict[str, None] = {}
    for name in names:
        found |= dict.fromkeys([*with_needed(jobs, jobs[name].after), name])
    return list(found)


@dataclass(frozen=True, slots=True)
class Running:
    """A job that was started."""

    name: str
    gpus: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began: float


class Machine:
    """The GPUs of this machine, and what runs on them."""

    def __init__(self, gpus: Sequence[str], models: Path, out: Path) -> None:
        self.free = list(gpus)
        self.running: list[Running] = []
        self._models, self._out = models.resolve(), out.resolve()

    def start(self, name: str, job: Job) -> None:
        """Start a job on the first free GPUs."""
        gpus = tuple(self.free[: job.gpus])
        del self.free[: job.gpus]
        folder = self._out / name
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / "log.txt").open("wb")
        env = os.environ | {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "OUT": str(folder),
            "ALL": str(self._out),
            "MODELS": str(self._models),
            "PYTHON": sys.executable,
        }
        script = _PRELUDE + job.run
        if job.mps:
            # Short: a socket's path has at most 107 characters.
            env["CUDA_MPS_PIPE_DIRECTORY"] = f"/tmp/mps-{os.getpid()}-{name}"
            env["CUDA_MPS_LOG_DIRECTORY"] = str(folder)
            # Clients count those GPUs anew that the daemon was given.
            env["TANDEMKV_CLIENT_GPUS"] = ",".join(map(str, range(job.gpus)))
            script = _WITH_MPS + script
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=ROOT,
            env=env | job.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.running.append(Running(name, gpus, process, log, time.monotonic()))

    def ended(self, jobs: Mapping[str, Job]) -> Iterator[tuple[str, int, float]]:
        """Give name, exit code and seconds of each job that has ended, or ran into its limit."""
        for each in list(self.running):
            seconds = time.monotonic() - each.began
            if each.process.poll() is None and seconds < jobs[each.name].limit_s:
                continue
            self._end(each)  # what it has left as well
            self.running.remove(each)
            self.free = sorted([*self.free, *each.gpus])
            each.log.close()
            code = each.process.returncode
            if code == 0:
                (self._out / each.name / "passed").touch()
            yield each.name, code, seconds

    def end(self) -> None:
        """End what runs."""
        for each in self.running:
            self._end(each)

    def _end(self, each: Running) -> None:
        """End a job and all that it started: what comes next gets its GPUs."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, sent)
            deadline = time.monotonic() + _END_S
            while _group_lives(each.process) and time.monotonic() < deadline:
                time.sleep(0.05)
        each.process.wait()


def _group_lives(leader: subprocess.Popen[bytes]) -> bool:
    leader.poll()  # else it stays in the group when it has ended
    try:
        os.killpg(leader.pid, 0)
    except ProcessLookupError:
        return False
    return True


_PRELUDE = """
set -euo pipefail
await_servers() {  # ports: returns once all answer; fails once a job of this shell has ended
    local port count=$(jobs -p | wc -l)
    for port; do
        until curl -sf -o /dev/null "http://127.0.0.1:$port/health"; do
            sleep 1
            [ "$(jobs -pr | wc -l)" = "$count" ] || { echo "a server has ended"; return 1; }
        done
    done
}
"""
_WITH_MPS = """
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
PATH="$PATH:/usr/local/nvidia/bin"
nvidia-cuda-mps-control -d
trap 'echo quit | nvidia-cuda-mps-control' EXIT
export CUDA_VISIBLE_DEVICES=$TANDEMKV_CLIENT_GPUS
"""


def run(jobs: Mapping[str, Job], names: Sequence[str], machine: Machine, out: Path) -> list[str]:
    """Run jobs until none is left that can run; return those that failed or never started."""
    waiting = [name for name in names if not (out / name / "passed").exists()]
    failed: list[str] = []
    try:
        while waiting or machine.running:
            passed = {name for name in jobs if (out / name / "passed").exists()}
            for name in list(waiting):
                job = jobs[name]
                if job.gpus <= len(machine.free) and passed.issuperset(job.after):
                    machine.start(name, job)
                    waiting.remove(name)
                    print(f"{name}: started", flush=True)
            if not machine.running:
                break
            time.sleep(_POLL_S)
            for name, code, seconds in machine.ended(jobs):
                failed += [name] if code else []
                how = f"FAILED with {code}" if code else "passed"
                print(f"{name}: {how} after {seconds:.0f} s", flush=True)
    finally:
        machine.end()
    for name in waiting:
        print(f"{name}: not started: too few GPUs, or a job failed that it comes after", flush=True)
    return [*failed, *waiting]


def main() -> int:
    """Return 0 if all that was asked for has passed."""
    jobs = read_jobs()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, default=Path("models"), help="see gpus.yaml")
    parser.add_argument("--out", type=Path, default=Path("build/gpus"))
    parser.add_argument("--only", nargs="*", choices=list(jobs), help="and what they come after")
    parser.add_argument("--gpus", help="ids, with commas; default: all that there are")
    parser.add_argument("--list", action="store_true", help="print the jobs, and start none")
    args = parser.parse_args()
    names = with_needed(jobs, args.only or list(jobs))
    if args.list:
        for name in names:
            print(f"{name}, {jobs[name].gpus} GPUs:\n  {jobs[name].run.strip()}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the jobs, too
    gpus = args.gpus.split(",") if args.gpus else map(str, range(torch.cuda.device_count()))
    return 1 if run(jobs, names, Machine(list(gpus), args.models, args.out), args.out) else 0


if __name__ == "__main__":
    sys.exit(main())
