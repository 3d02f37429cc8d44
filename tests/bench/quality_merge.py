# SPDX-License-Identifier: Apache-2.0
"""Join folders of ``tandemkv quality``: parts of one campaign, or runs on several machines.

    python tests/bench/quality_merge.py OUT FOLDER [FOLDER ...]
    tandemkv quality --report-only --out OUT

Answers of one configuration, task and set of samples are joined by sample name (``--part``);
counters add up, shares are weighted by steps. Only results on equal samples belong in one report:
what is of others is refused. Pairs with dense are made by sample name, so dense and the rest
should be of one dtype.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec

from tandemkv.server.evaluation.quality.report import CAMPAIGN_FILE, write_campaign
from tandemkv.server.evaluation.quality.results import (
    Answer,
    TaskResult,
    read_result,
    read_runs,
    write_configuration,
    write_result,
)


def join(one: TaskResult, other: TaskResult) -> TaskResult:
    """Return the results of both; where both answered a sample, `one` counts.

    Raises
    ------
    SystemExit
        If they are of different samples.
    """
    if one.samples_digest != other.samples_digest:
        raise SystemExit(f"{one.task}: folders hold different samples; give those of one campaign")
    known = {answer.name for answer in one.answers}
    new = [answer for answer in other.answers if answer.name not in known]
    if not new:
        return one
    if len(new) < len(other.answers):
        raise SystemExit(f"{one.task}: samples overlap in part; counters cannot be told apart")
    names = one.counters.keys() | other.counters.keys()
    return msgspec.structs.replace(
        one,
        answers=sorted([*one.answers, *new], key=_place),
        seconds=round(one.seconds + other.seconds, 2),
        attended_share=_mean(one, other, "attended_share"),
        fetched_rows_per_step=_mean(one, other, "fetched_rows_per_step"),
        decode_steps=_total(one.decode_steps, other.decode_steps),
        request_steps=_total(one.request_steps, other.request_steps),
        counters={n: one.counters.get(n, 0.0) + other.counters.get(n, 0.0) for n in sorted(names)},
    )


def _place(answer: Answer) -> tuple[int, str]:
    return (int(answer.name) if answer.name.isdecimal() else -1, answer.name)


def _mean(one: TaskResult, other: TaskResult, name: str) -> float | None:
    pairs = [
        (getattr(result, name), result.request_steps or len(result.answers))
        for result in (one, other)
    ]
    known = [(value, weight) for value, weight in pairs if value is not None]
    if not known:
        return None
    total: float = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total


def _total(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def merge(out: Path, folders: list[Path]) -> None:
    """Write the joined runs and descriptions to `out`; the first folder's description leads."""
    for folder in reversed(folders):
        path = folder / CAMPAIGN_FILE
        if path.is_file():
            write_campaign(out, json.loads(path.read_text(encoding="utf-8")))
    for folder in folders:
        if not any(folder.glob("runs/*/*.json")):
            print(f"{folder}: no results there")
            continue
        for configuration, results in read_runs(folder / "runs"):
            target = out / "runs" / configuration.slug
            if results:
                write_configuration(target, configuration)
            for name, result in results.items():
                kept = read_result(target, name)
                write_result(target, result if kept is None else join(kept, result))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    args = parser.parse_args()
    merge(args.out, args.folders)


if __name__ == "__main__":
    main()
