# SPDX-License-Identifier: Apache-2.0
"""The GPUs, asked for in a child process: this one must not hold memory that is measured."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from .report import BenchError, Gpu

_CODE = (
    "import msgspec; from tandemkv.server.bench.report import visible_gpu; "
    "print(msgspec.json.encode(visible_gpu()).decode())"
)
_TIMEOUT_S = 120


def query_gpu() -> Gpu | None:
    """Return the GPUs that a child sees, None on a machine without.

    Raises
    ------
    BenchError
        If the child fails.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", _CODE],
        env=os.environ.copy(),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise BenchError(f"the GPU could not be asked for: {lines[-1]}")
    return msgspec.json.decode(done.stdout, type=Gpu | None)
