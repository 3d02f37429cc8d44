# SPDX-License-Identifier: Apache-2.0
"""Item *numerics*: random shapes, types and options of every operation, against float64.

What is expected is computed by definitions in tests/kernels, never by the product. Most shapes are
for the CPU version of each operation, a twentieth for Triton's kernels, which are interpreted.
``TANDEMKV_NUMERICS`` is the number of shapes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from workbench import ROOT, Bench, Checks

sys.path += [str(ROOT / "tests" / folder) for folder in ("kernels", "policies")]

from numerics_draw import measure
from numerics_operations import INTERPRETED, OPERATIONS

INTERPRETED_SHARE = 0.05


def run(_bench: Bench) -> dict[str, Any]:
    """Measure all operations on one core; the item takes minutes."""
    number = int(os.environ.get("TANDEMKV_NUMERICS", "20000"))
    of_triton = spread(round(number * INTERPRETED_SHARE), INTERPRETED)
    of_cpu = spread(number - sum(of_triton.values()), OPERATIONS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {name: measure(name, OPERATIONS[name], of_cpu[name]) for name in of_cpu}
    finally:
        torch.set_num_threads(threads)
    found |= {f"{name}, Triton": row for name, row in interpreted(of_triton).items()}
    checks = Checks()
    for name, row in found.items():
        largest, failed = row["largest_error"], row["num_failures"]
        required = "1 of its tolerance at most"
        name = f"{name}: largest error of {row['shapes']} shapes"
        checks.add(name, largest, required, largest <= 1 and not failed)
    return checks.result(
        shapes=sum(row["shapes"] for row in found.values()),
        num_failures=sum(row["num_failures"] for row in found.values()),
        largest_error=max(row["largest_error"] for row in found.values()),
        operations=found,
    )


def spread(number: int, names: Any) -> dict[str, int]:
    """Share out shapes, one each at least; the first get what is left over."""
    names = list(names)
    return {
        name: max(1, number // len(names) + (place < number % len(names)))
        for place, name in enumerate(names)
    }


def interpreted(numbers: dict[str, int]) -> dict[str, Any]:
    """Measure Triton's kernels in a process that interprets them.

    Raises
    ------
    RuntimeError
        If it fails, with what it wrote.
    """
    script = Path(__file__).with_name("numerics_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(script), json.dumps(numbers)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if child.returncode:
        raise RuntimeError(f"interpreted kernels: {child.stdout}{child.stderr}")
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found
