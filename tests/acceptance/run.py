# SPDX-License-Identifier: Apache-2.0
"""Run the acceptance list and write one JSON per item.

python tests/acceptance/run.py [--only exact needle] [--jobs 2] [--out docs/acceptance]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))
import items


def stamp(arguments: list[str], seconds: float) -> dict[str, Any]:
    """What made a result: command, versions, machine size."""
    return {
        "command": " ".join(["python", "tests/acceptance/run.py", *arguments]),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {n: version(n) for n in ("torch", "sglang", "transformers", "tandemkv")},
        "cores": os.cpu_count(),
        "threads_per_process": 1,
        "model": "SmolLM2-135M-Instruct, float32",
        "seconds": round(seconds, 1),
    }


def main() -> int:
    """Return 0 if every item passed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=sorted(items.ITEMS), help="items to run")
    parser.add_argument("--jobs", type=int, default=1, help="servers at once, where items allow it")
    parser.add_argument("--out", type=Path, default=Path("docs/acceptance"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    table = Table("item", "passed", "seconds", title="Acceptance")
    failed = 0
    for name in args.only or list(items.ITEMS):
        start = time.monotonic()
        result = items.ITEMS[name](args.jobs)
        seconds = time.monotonic() - start
        failed += not result["pass"]
        arguments = ["--only", name, "--jobs", str(args.jobs)]
        text = json.dumps(stamp(arguments, seconds) | result, indent=1)
        (args.out / f"{name}.json").write_text(text + "\n")
        table.add_row(name, "yes" if result["pass"] else "NO", f"{seconds:.0f}")
    Console().print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
