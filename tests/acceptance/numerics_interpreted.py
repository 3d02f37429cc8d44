# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of item *numerics* on a CPU, in a process of their own.

    TRITON_INTERPRET=1 python tests/acceptance/numerics_interpreted.py '{"score_keys": 5}'

Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / x) for x in ("acceptance", "kernels", "policies")]

import torch
from interpreting import mend_interpreter
from numerics_draw import measure
from numerics_operations import OPERATIONS


def take_triton() -> list[torch.device]:
    """Let operations on CPU tensors be those for a GPU; return where they were."""
    found: list[torch.device] = []

    def uses_triton(device: torch.device) -> bool:
        found.append(device)
        return True

    for name, module in list(sys.modules.items()):
        if name.startswith("tandemkv.kernels.") and hasattr(module, "uses_triton"):
            module.uses_triton = uses_triton
    return found


def main() -> None:
    """Print a measurement of each operation as JSON."""
    mend_interpreter()
    launched, found = take_triton(), {}
    for name, number in json.loads(sys.argv[1]).items():
        launched.clear()
        found[name] = measure(name, OPERATIONS[name], number, is_interpreted=True)
        if not launched:
            raise RuntimeError(f"{name} is not in triton_ops")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
