# SPDX-License-Identifier: Apache-2.0
"""What the acceptance items share: texts, settings at equal attended tokens, checks, tasks."""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rank_servers import model_dir

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("quality", ROOT / "tests/bench/quality.py")
assert _spec is not None
assert _spec.loader is not None
quality = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(quality)

EXACT_LAYERS = "0,1"
ATTENDED_512 = 4 + 2 * 512 + 64
ATTENDED_1024 = 4 + 2 * 1024 + 64
# Without samples: what is recorded is of as many tokens for every policy.
_SPARSE = {"resident_factor": 2.0, "num_recent_tokens": 64, "sample_tokens": 0}
# As many rows a step as when it was recorded (K/16).
SPARSE_512 = {"budget_tokens": 512, "fetch_cap": 32, **_SPARSE}
SPARSE_1024 = {"budget_tokens": 1024, "fetch_cap": 64, **_SPARSE}
# Streaming attends to as many tokens as the others.
STREAMING_512 = {"policy": "streaming", "num_recent_tokens": ATTENDED_512 - 4}
STREAMING_1024 = {"policy": "streaming", "num_recent_tokens": ATTENDED_1024 - 4}
DENSE = {"policy": "look_ahead", "budget_tokens": 4200, "resident_factor": 2.0}
SMALL = {
    "policy": "look_ahead", "budget_tokens": 96, "resident_factor": 2.0, "num_recent_tokens": 16,
}  # fmt: skip
SMALL_RESIDENT = 4 + 2 * 96


@dataclass(frozen=True)
class Bench:
    """How items are run.

    Parameters
    ----------
    jobs : int
        Servers at once, where an item has several independent ones.
    work : Path
        Where the result of each task is kept, ``<item>/<task>.json``.
    resume : bool
        Take kept results instead of running their tasks again.
    """

    jobs: int
    work: Path
    resume: bool = False

    def run(self, item: str, tasks: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        """Run independent tasks; one that fails does not lose the results of the others.

        Raises
        ------
        RuntimeError
            After all have ended, if any failed.
        """
        folder = self.work / item
        folder.mkdir(parents=True, exist_ok=True)

        def one(name: str) -> Any:
            path = folder / f"{''.join(c if c.isalnum() else '_' for c in name)}.json"
            if self.resume and path.exists():
                return json.loads(path.read_text())
            found = tasks[name]()
            path.write_text(json.dumps(found))
            print(f"{item}: {name} done", file=sys.stderr, flush=True)
            return found

        results: dict[str, Any] = {}
        failed = []
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = {name: pool.submit(one, name) for name in tasks}
            for name, future in futures.items():
                try:
                    results[name] = future.result()
                except Exception:
                    traceback.print_exc()
                    failed.append(name)
        if failed:
            raise RuntimeError(f"{item}: {', '.join(failed)} failed; --resume keeps the others")
        return results


class Checks:
    """Figures that are judged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, value: Any, required: str, passed: bool) -> None:
        """Judge one figure; `required` says in words what it has to be."""
        self.rows.append({"name": name, "value": value, "required": required, "pass": bool(passed)})

    def result(self, **details: Any) -> dict[str, Any]:
        """Return the item's result; it passes if every check does."""
        return {
            "pass": all(row["pass"] for row in self.rows),
            "checks": self.rows,
            **details,
        }


def tokenizer() -> Any:
    """Return the model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir())


@cache
def long_ids(num_letters: int = 120_000) -> list[int]:
    """Some ten thousand tokens of real prose, or of more letters."""
    return list(tokenizer()(quality.language_reference()[:num_letters])["input_ids"])
