# SPDX-License-Identifier: Apache-2.0
"""Run `triton_cases.py`: with compiled kernels on a GPU, interpreted without one.

Triton decides when it is imported whether it interprets, and other tests import it (through
transformers) before a module could set that, hence the process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
CASES = Path(__file__).with_name("triton_cases.py")


def test_triton_kernels_equal_the_references(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
