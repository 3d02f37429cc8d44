# SPDX-License-Identifier: Apache-2.0
"""Run ``model_runs.py`` from a test, and read what it leaves."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import MODES

ANSWER = "exit code "


class Found(NamedTuple):
    """A model, and what its runs have left; `folder` has its checkpoint, in plain numbers."""

    name: str
    folder: Path
    stock: dict[str, torch.Tensor]
    exact: dict[str, torch.Tensor]
    sparse: dict[str, torch.Tensor]


def chosen(request: pytest.FixtureRequest, names: Iterable[str]) -> list[str]:
    """Return those of `names` that the chosen tests of the module need."""
    items = [item for item in request.session.items if item.path == request.path]
    needed = {item.callspec.params.get("found") for item in items if hasattr(item, "callspec")}
    return [name for name in names if name in needed]


def found_of(runs: Path, name: str, folder: Path) -> Found:
    """Read what a model's runs have left in `runs`; fails with what a run printed that failed."""
    return Found(name, folder, *(result(runs / f"{name}-{mode}.safetensors") for mode in MODES))


def result(path: Path) -> dict[str, torch.Tensor]:
    """Read what a run has left, or fail with what it printed."""
    assert path.is_file(), f"{path.stem}:\n{path.with_suffix('.log').read_text()[-4000:]}"
    return load_file(path)


def run_program(folder: Path, *arguments: str) -> None:
    """Let ``model_runs.py`` do a line, and fail with what it says if it does."""
    program = _program()
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(shlex.join([str(folder), *arguments]) + "\n")
    program.stdin.flush()
    answer = next((line for line in program.stdout if line.startswith(ANSWER)), "none: it ended")
    log = folder / "program.log"
    assert answer == f"{ANSWER}0\n", log.read_text()[-4000:] if log.exists() else answer


@functools.cache
def _program() -> subprocess.Popen[str]:
    """Start it, once for all tests of this process: it imports SGLang for half a minute."""
    here = Path(__file__).parent
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    program = subprocess.Popen(
        [sys.executable, "-P", str(here / "model_runs.py")], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    atexit.register(program.kill)
    return program
