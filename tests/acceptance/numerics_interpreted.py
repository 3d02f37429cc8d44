# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of item *numerics* on a CPU, in a process of their own.

    TRITON_INTERPRET=1 python tests/acceptance/numerics_interpreted.py '{"score_keys": 5}'

Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / x) for x in ("acceptance", "kernels", "policies")]

from interpreting import mend_interpreter
from numerics_draw import measure
from numerics_operations import OPERATIONS

from tandemkv.kernels import dispatch

_TRITON = "tandemkv.kernels.triton_ops."
# Weights are quantised once, at start, by one function for all devices.
_OF_ALL_DEVICES = ("quantize_int8",)


def take_triton() -> None:
    """Let operations on CPU tensors be those for a GPU; one that has none is an error."""
    of_device = dispatch._resolve

    def resolve(module: str, function: str, device_type: str) -> Callable[..., Any]:
        del device_type
        found = of_device(module, function, "cuda")
        if not found.__module__.startswith(_TRITON) and function not in _OF_ALL_DEVICES:
            raise RuntimeError(f"{function} is not in {_TRITON}{module}")
        return found

    dispatch._resolve = resolve


def main() -> None:
    """Print a measurement of each operation as JSON."""
    mend_interpreter()
    take_triton()
    found = {}
    for name, number in json.loads(sys.argv[1]).items():
        found[name] = measure(name, OPERATIONS[name], number, is_interpreted=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
