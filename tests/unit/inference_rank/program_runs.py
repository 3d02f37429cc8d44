# SPDX-License-Identifier: Apache-2.0
"""Run ``model_runs.py`` from a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_program(folder: Path, *arguments: str) -> None:
    """Run ``model_runs.py``, and fail with what it says if it does."""
    here = Path(__file__).parent
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    command = [sys.executable, "-P", str(here / "model_runs.py"), str(folder), *arguments]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert run.returncode == 0, run.stdout + run.stderr
