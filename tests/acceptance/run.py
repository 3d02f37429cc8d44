# SPDX-License-Identifier: Apache-2.0
"""Run the acceptance list and write one JSON per item.

    python tests/acceptance/run.py [--only exact needle] [--jobs 2] [--out docs/acceptance]

The results of the single servers of an item are kept under --work; --resume takes them from
there instead of running those servers again.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import sys
import tempfile
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))
import items
import workbench
from rank_servers import model_dir

from tandemkv.server.evaluation.compact_json import compact_json


def stamp(arguments: list[str], name: str) -> dict[str, Any]:
    """What makes a result: command, versions, machine size."""
    is_on_gpu = name in items.ON_GPUS
    return {
        "command": " ".join(["python", "tests/acceptance/run.py", *arguments]),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {n: version(n) for n in ("torch", "sglang", "transformers", "tandemkv")},
        "cores": os.cpu_count(),
        "threads_per_process": 1,
        "model": f"{Path(model_dir()).name}, bfloat16"
        if is_on_gpu
        else "SmolLM2-135M-Instruct, float32",
        **({"gpu": torch.cuda.get_device_name()} if is_on_gpu else {}),
    }


def shown(value: Any) -> str:
    """One cell of the table."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return escape(text if len(text) <= 60 else text[:57] + "...")


def scrub(text: str) -> str:
    """Take this machine's paths out of a result."""
    text = text.replace(model_dir(), "MODEL_DIR")
    return re.sub(r"/(?:tmp|root|home)/[\w./-]+", "PATH", text)


def main() -> int:
    """Return 0 if every item passed."""
    every = items.ITEMS | items.ON_GPUS
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=sorted(every), help="items to run")
    parser.add_argument("--jobs", type=int, default=1, help="servers at once, where items allow it")
    parser.add_argument("--out", type=Path, default=workbench.ROOT / "docs/acceptance")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "tandemkv-acceptance"
    )
    parser.add_argument("--resume", action="store_true", help="take what --work already has")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = workbench.Bench(jobs=args.jobs, work=args.work, resume=args.resume)
    table = Table("item", "figure", "value", "required", "passed", title="Acceptance")
    failed = 0
    for name in args.only or list(items.ITEMS):
        # Before what may take long: its result would be lost with it.
        made = stamp(["--only", name, "--jobs", str(args.jobs)], name)
        start = time.monotonic()
        try:
            result = every[name](bench)
        except Exception as error:
            traceback.print_exc()
            failed += 1
            table.add_row(name, "did not finish", shown(error), "", "[red]NO[/]")
            continue
        made["seconds"] = round(time.monotonic() - start, 1)
        failed += not result["pass"]
        text = scrub(compact_json(made | result))
        (args.out / f"{name}.json").write_text(text)
        for i, row in enumerate(result["checks"]):
            verdict = "yes" if row["pass"] else "[red]NO[/]"
            cells = (shown(row["name"]), shown(row["value"]), shown(row["required"]))
            table.add_row("" if i else name, *cells, verdict)
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
