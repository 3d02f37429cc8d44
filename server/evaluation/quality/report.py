# SPDX-License-Identifier: Apache-2.0
"""Write the report of a folder: JSON, Markdown, HTML and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.compact_json import compact_json

from .plots import draw
from .report_html import page
from .report_markdown import markdown
from .results import read_runs
from .summary import summarise

CAMPAIGN_FILE = "campaign.json"


def write_campaign(out: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """Keep how results come about; tasks of earlier campaigns in the folder stay in.

    Returns
    -------
    dict
        What was written.
    """
    path = out / CAMPAIGN_FILE
    earlier = _read_campaign(path)["tasks"] if path.is_file() else {}
    merged = {**described, "tasks": {**earlier, **described["tasks"]}}
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    return merged


def write_report(out: Path, console: Console) -> list[Path]:
    """Write ``report.json``, ``report.md``, ``report.html`` and ``plots/``; return their paths.

    Every result below ``runs/`` that is of the samples described in ``campaign.json`` goes in,
    whichever system wrote it. Raises `SettingsError` if there is no campaign or no result in `out`.
    """
    path = out / CAMPAIGN_FILE
    if not path.is_file():
        raise SettingsError(
            f"{out}: no {CAMPAIGN_FILE} there; run `tandemkv quality` with it first"
        )
    described = _read_campaign(path)
    summary = summarise(described, read_runs(out / "runs"))
    try:
        drawn = draw(described, summary.rows)
    except ImportError:
        drawn = {}
        text = "no plots: matplotlib is missing; pip install 'tandemkv[quality]'"
        console.print(text, markup=False, soft_wrap=True)
    written = []
    for name, svg in drawn.items():
        picture = out / "plots" / f"{name}.svg"
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_text(svg, encoding="utf-8")
        written.append(picture)
    rows = [msgspec.to_builtins(row) for row in summary.rows]
    whole = {**described, "left_out": summary.left_out, "rows": rows}
    names = [f"plots/{name}.svg" for name in drawn]
    inline = [svg[svg.index("<svg") :] for svg in drawn.values()]
    texts = {
        "report.json": compact_json(whole),
        "report.md": markdown(described, summary, names),
        "report.html": page(described, summary, inline),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    return [*(out / name for name in texts), *written]


def _read_campaign(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{path}: not valid JSON ({error}); delete it") from error
    return found
