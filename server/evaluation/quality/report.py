# SPDX-License-Identifier: Apache-2.0
"""Write the report of a folder, JSON, Markdown, HTML and plots; and read the JSON again."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.compact_json import compact_json

from .plots import draw
from .report_tables import tables
from .results import read_runs
from .summary import Row, Summary, summarise

CAMPAIGN_FILE, REPORT_FILE = "campaign.json", "report.json"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem;
  color: #222; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .7rem; text-align: left;
  vertical-align: top }
th { border-bottom: 2px solid #888 }
tbody tr:hover { background: #f4f6f8 }
p.note, header p { color: #555; max-width: 60rem }
.plots { display: flex; flex-wrap: wrap; gap: 1rem }
.plots svg { max-width: 38rem; height: auto }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181a1b } th, td { border-color: #444 }
  tbody tr:hover { background: #24282b } p.note, header p { color: #aaa }
  .plots svg { background: #fff; border-radius: 4px }
}
"""


def write_campaign(out: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """Keep how results come about, and return it; tasks of earlier campaigns there stay in.

    So do the texts that those were made from.

    Raises `SettingsError` if those are of another model, or of other weights of it.
    """
    path = out / CAMPAIGN_FILE
    before = _read_campaign(path) if path.is_file() else described
    for key in ("model_hash", "dtype"):
        if before.get(key) != described.get(key):
            raise SettingsError(
                f"out={out}: the results there are of {before.get('model')} "
                f"({key} {before.get(key)}), and these would be of {described.get('model')} "
                f"({described.get(key)}); give another --out"
            )
    merged = {**described, "tasks": {**before["tasks"], **described["tasks"]}}
    if before["tasks"].keys() - described["tasks"].keys():
        texts, earlier = described["corpus"], before["corpus"]
        merged["corpus"] = [*texts, *(text for text in earlier if text not in texts)]
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
    except SettingsError as error:
        drawn = {}
        console.print(f"no plots: {error}", markup=False, soft_wrap=True)
    whole = {
        **described,
        "left_out": summary.left_out,
        "rows": [msgspec.to_builtins(row) for row in summary.rows],
    }
    plots = {f"plots/{name}.svg": svg for name, svg in drawn.items()}
    inline = [svg[svg.index("<svg") :] for svg in drawn.values()]
    texts = {
        REPORT_FILE: compact_json(whole),
        "report.md": markdown(described, summary, list(plots)),
        "report.html": page(described, summary, inline),
        **plots,
    }
    for name, text in texts.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in texts]


def markdown(described: Mapping[str, Any], summary: Summary, plots: Sequence[str]) -> str:
    """Return the report as Markdown.

    `plots` are paths of pictures, relative to the report.
    """
    lines = "\n\n".join(_headline(described, summary))
    parts = [f"# Quality: {described['model']}\n\n{lines}\n"]
    parts += [table.markdown() for table in tables(described, summary)]
    if plots:
        pictures = "\n".join(f"![score against attended share]({path})" for path in plots)
        parts.append(f"## Plots\n\n{pictures}\n")
    return "\n".join(parts)


def page(described: Mapping[str, Any], summary: Summary, plots: Sequence[str]) -> str:
    """Return the report as one HTML file that needs nothing else.

    `plots` are SVG elements, put in as they are.
    """
    title = html.escape(f"Quality: {described['model']}")
    head = "".join(f"<p>{html.escape(line)}</p>" for line in _headline(described, summary))
    body = "".join(table.html() for table in tables(described, summary))
    pictures = f'<h2>Plots</h2><div class="plots">{"".join(plots)}</div>' if plots else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><header><h1>{title}</h1>{head}</header>"
        f"{body}{pictures}</body></html>\n"
    )


def _headline(described: Mapping[str, Any], summary: Summary) -> list[str]:
    """Return the lines that say what was measured on what."""
    versions = ", ".join(f"{k} {v}" for k, v in described["versions"].items())
    texts = ", ".join(f"{t['name']} ({t['sha256']})" for t in described["corpus"])
    lines = [
        f"{described['date']}, {described['model']}, {described['dtype']}, {described['device']}, "
        f"{described['cores']} cores; Python {described['python']}, {versions}.",
        f"Command: `{described['command']}`",
        f"Texts: {texts}.",
    ]
    if described["corpus_absent"]:
        lines.append(f"Built-in texts absent here: {', '.join(described['corpus_absent'])}.")
    if summary.left_out:
        lines.append(
            f"Left out, measured on other samples than these: {', '.join(summary.left_out)}."
        )
    return lines


def _read_campaign(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{path}: not valid JSON ({error}); delete it") from error
    if not isinstance(found, dict) or not isinstance(found.get("tasks"), dict):
        raise SettingsError(f"{path}: `tandemkv quality` did not write it; delete it")
    return found


class ReportFile(NamedTuple):
    """A report: how its results came about, and its rows."""

    name: str
    described: dict[str, Any]
    rows: list[Row]

    @property
    def sparse(self) -> dict[str, Row]:
        """Rows that are not the reference, by label and budget."""
        return {f"{row.label}, {row.budget}": row for row in self.rows if row.system != "sglang"}

    @property
    def dense(self) -> Row | None:
        """The reference, if it was measured."""
        return next((row for row in self.rows if row.system == "sglang"), None)


def read_quality_report(path: Path) -> ReportFile:
    """Read a report, or that of a folder.

    Raises `SettingsError` if the file is not one.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        rows = msgspec.convert(described.pop("rows"), list[Row])
        if not isinstance(described["tasks"], dict):
            raise TypeError("tasks")
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read ({error.strerror}); give a {REPORT_FILE} of `tandemkv "
            "quality`, or its folder"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise SettingsError(
            f"{path}: not a {REPORT_FILE} of `tandemkv quality` ({error}); make it anew with "
            "--report-only --out of its folder"
        ) from error
    return ReportFile(str(path), described, rows)
