# SPDX-License-Identifier: Apache-2.0
"""Makes ``report.json`` files with figures that are known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandemkv.server.evaluation.compact_json import compact_json

TASK: dict[str, Any] = {
    "title": "Needle", "definition": "d", "source": "s", "measure": "score", "samples": 4,
    "samples_digest": "s1", "context_tokens": 1024, "forced_tokens": 17, "seed": 0,
    "prompt_style": "raw", "longest_tokens": 1030,
}  # fmt: skip


def score(items: Sequence[float], change: float | None = None, spread: float = 0.5) -> Any:
    """Return the score of a task, with an interval of `spread` about its change."""
    found: dict[str, Any] = {
        "value": sum(items) / len(items), "low": 0.0, "high": 1.0, "samples": len(items),
        "items": list(items),
    }  # fmt: skip
    if change is not None:
        found |= {"change": change, "change_low": change - spread, "change_high": change + spread}
    return found


def row(budget: str, scores: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """Return the row of one configuration of look_ahead."""
    return {
        "system": "tandemkv", "policy": "look_ahead", "budget": budget, "attended_tokens": 9,
        "scores": dict(scores), "settings": settings,
    }  # fmt: skip


def dense(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reference's row."""
    return {
        "system": "sglang", "policy": "dense", "budget": "all", "attended_tokens": None,
        "scores": dict(scores),
    }  # fmt: skip


def write(path: Path, rows: Sequence[Mapping[str, Any]], **described: Any) -> Path:
    """Write a report as `quality` does."""
    whole = {
        "model": "m", "model_hash": "h", "dtype": "float32", "corpus": [{"name": "t"}],
        "tasks": {"niah_single": TASK, "perplexity": {**TASK, "measure": "perplexity"}},
        **described, "rows": list(rows),
    }  # fmt: skip
    text = compact_json(whole)
    assert json.loads(text) == whole
    path.write_text(text, encoding="utf-8")
    return path
