# SPDX-License-Identifier: Apache-2.0
"""What was measured, on disk: one folder a configuration, one file a task.

Other systems write the same files (`write_configuration`, `write_result`), so that one report
holds all of them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tandemkv.cache_rank.protocol.errors import SettingsError

from .configurations import Configuration

CONFIGURATION_FILE = "configuration.json"
MEASURED = "measured_at_start"
"""Name, among resolved settings, of what an inference rank measured and decided at its start."""


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What came back for one sample; which fields are set depends on its mode."""

    name: str
    text: str | None = None
    score: float | None = None
    """``generate``."""
    nll: list[float] | None = None
    """``force``: negative log-likelihood of every forced token but the first, in nats."""
    tokens: list[int] | None = None
    """``continue``, dense only: what it wrote."""
    agrees: list[bool] | None = None
    """``continue``: whether each token of dense's, but the first, would have been chosen."""
    best: list[int] | None = None
    """``force``, where a sample asks for it: the likeliest token in the place of every forced one
    but the first."""


class Probes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Attention mass, means over heads and measured layers, one value a probed step and request.

    Steps of a request are neighbours.
    """

    mass: list[float]
    oracle_mass: list[float]
    recall: list[float]
    mass_by_layer: dict[str, float]


class TaskResult(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One task under one configuration."""

    task: str
    samples_digest: str
    """Of the samples; a report holds only results on the same ones."""
    digest: str
    """Of the samples and of all settings: what a result is taken for when resuming."""
    answers: list[Answer]
    seconds: float
    attended_share: float | None = None
    """Measured share of the context that decode attended to, in layers that are not exact. A step
    that attends to everything for a part of the heads counts as if it did for all."""
    fetched_rows_per_step: float | None = None
    """Rows (a key and a value of one KV head in one layer) that selection sent to the inference
    rank, per request and decode step."""
    decode_steps: float | None = None
    request_steps: float | None = None
    """Decode steps of the server, and of each request summed up."""
    probes: Probes | None = None
    counters: dict[str, float] = {}


def write_configuration(folder: Path, configuration: Configuration) -> None:
    """Write what the results in `folder` belong to."""
    folder.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(configuration), indent=1)
    (folder / CONFIGURATION_FILE).write_bytes(text)


def with_measured(folder: Path, configuration: Configuration) -> Configuration:
    """Return the configuration with what an earlier server of it measured at its start, if any."""
    path = folder / CONFIGURATION_FILE
    if not configuration.is_open or not path.is_file():
        return configuration
    try:
        earlier = msgspec.json.decode(path.read_bytes(), type=Configuration).resolved
    except msgspec.DecodeError:
        return configuration  # of another version, and about to be replaced
    kept = {MEASURED: earlier[MEASURED]} if MEASURED in earlier else {}
    return msgspec.structs.replace(configuration, resolved=configuration.resolved | kept)


def write_result(folder: Path, result: TaskResult) -> None:
    """Write a result under its final name at once, so that there is never half of one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.task}.json"
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(result))
    partial.replace(path)


def read_result(folder: Path, task: str) -> TaskResult | None:
    """Return the result of a task, None if there is none.

    Raises `SettingsError` if the file is not of this form.
    """
    path = folder / f"{task}.json"
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=TaskResult)
    except msgspec.DecodeError as error:
        raise SettingsError(
            f"{path}: not a result of this version ({error}); delete it to measure again"
        ) from error


def result_files(folder: Path) -> list[Path]:
    """Return the files of a configuration's results, one a task."""
    return sorted(path for path in folder.glob("*.json") if path.name != CONFIGURATION_FILE)


def read_runs(runs: Path) -> list[tuple[Configuration, dict[str, TaskResult]]]:
    """Return every configuration below `runs` with its results, dense first, then by name.

    Raises `SettingsError` if there is none, or a file is not of this form.
    """
    found = []
    for path in sorted(runs.glob(f"*/{CONFIGURATION_FILE}")):
        try:
            configuration = msgspec.json.decode(path.read_bytes(), type=Configuration)
        except msgspec.DecodeError as error:
            raise SettingsError(f"{path}: not a configuration of this version ({error})") from error
        names = [file.stem for file in result_files(path.parent)]
        results = ((name, read_result(path.parent, name)) for name in names)
        found.append((configuration, {name: each for name, each in results if each is not None}))
    if not found:
        raise SettingsError(f"{runs}: no results there; run `tandemkv quality` with this --out")
    return sorted(found, key=lambda item: (not item[0].is_dense, item[0].system != "tandemkv"))
