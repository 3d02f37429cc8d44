# SPDX-License-Identifier: Apache-2.0
"""Run a file of cases for Triton kernels: compiled on a GPU, interpreted without one.

Triton decides when it is imported whether it interprets, and other tests import it (through
transformers) before a module could set that, hence the process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

_MOST_WORKERS = 4
SCORES = ("triton_score_cases.py", "triton_score_window_cases.py", "triton_fused_cases.py")
OTHERS = tuple(
    sorted(
        path.name
        for path in Path(__file__).parent.glob("triton_*cases.py")
        if path.name not in SCORES and "targets" not in path.name
    )
)
"""Two processes for all files: each imports for some seconds."""
_OF_PAIRS = "TANDEMKV_TEST_PAIRS"


def is_interpreted() -> bool:
    """Whether this process interprets kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_of_pairs() -> bool:
    """Whether this process runs combinations that have every pair of parameters, not all."""
    return os.environ.get(_OF_PAIRS) == "1"


def run_cases(
    *names: str, cache_dir: Path, is_compiled: bool = False, is_whole: bool = False
) -> None:
    """Run files of ``tests/kernels``, and fail with the output unless every case passes.

    Interpreted cases are bound by one core each, minutes long, and do not touch one another: they
    share the cores that no other process of pytest-xdist has. Unless `is_whole`, they are as many
    combinations of parameters as have every pair of them. With `is_compiled` the cases compile and
    run nothing, and see no GPU.
    """
    has_gpu = torch.cuda.is_available() and not is_compiled
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "TRITON_CACHE_DIR": str(cache_dir)}
    environment["TRITON_INTERPRET"] = "0" if has_gpu or is_compiled else "1"
    environment[_OF_PAIRS] = "0" if has_gpu or is_compiled or is_whole else "1"
    if is_compiled:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    others = int(environment.pop("PYTEST_XDIST_WORKER_COUNT", "1"))
    workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // others)
    if not has_gpu and workers > 1:
        command += ["-n", str(workers)]
    command += [str(Path(__file__).with_name(name)) for name in names]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
