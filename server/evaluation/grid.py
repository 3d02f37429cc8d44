# SPDX-License-Identifier: Apache-2.0
"""Settings to compare: their names, and a YAML file that `quality` and `bench decode` both read.

By the names reports of quality and of speed are joined.

Each entry of ``points`` is a product of its lists, and the entries are joined::

    points:
      - {budget_tokens: [512, 1024, 2048], resident_factor: [1, 2], fetch_cap: [K/16, K]}
      - {budget_tokens: 1024, sample_tokens: [0, 128, 256], exact_layers: [none, "0,1"]}
    streaming: [2180]

What an entry does not name is what `serve` chooses. ``streaming`` lists tokens attended to.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandemkv.cache_rank.policies.base import PolicyError
from tandemkv.cache_rank.policies.registry import read_by, resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.rank_settings import DEFAULT_POLICY, SelectionSettings
from tandemkv.server.plan.pages import on_device
from tandemkv.server.settings.yaml_text import load_yaml

_NAME = re.compile(
    r"(?:(?P<policy>[a-z][a-z_]*)-)?k(?P<k>\d+)-c(?P<c>[\d.]+)-cap(?P<cap>\d+)-s(?P<samples>\d+)"
    r"-(?P<index>native|int8|int4)-x(?P<exact>none|[\d.]+)"
)
_RING_ONLY = re.compile(r"streaming-\d+")
_IN_NAME = {
    *("policy", "declared", "budget_tokens", "resident_factor", "fetch_cap", "sample_tokens"),
    *("index_dtype", "exact_layers"),
}
_SHARE_OF_K = re.compile(r"K(?:/([1-9]\d*))?")


class GridFile(BaseModel):
    """The file as it is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    points: tuple[dict[str, Any], ...] = Field(min_length=1)
    streaming: tuple[int, ...] = ()


def read_grid(
    path: Path, device: str, base: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Return settings of the group ``selection`` by name (`setting_name`), each once.

    `device`, the model's, decides what is open. Settings of `base` hold where an entry does not
    name them. Raises `SettingsError` if the file cannot be read, settings are unknown or contradict
    each other, or two entries have one name and are not the same.
    """
    try:
        found = GridFile.model_validate(read_yaml(path, "--grid"))
    except ValidationError as error:
        raise SettingsError(
            f"--grid {path}: {explained(error, 'the file')}; it has `points`, a list of settings "
            "of the group selection with their values, and optionally `streaming`"
        ) from error
    entries = [
        _joined(base or {}, values)
        for values in itertools.chain.from_iterable(map(_product, found.points))
    ]
    sink = SelectionSettings().num_sink_tokens
    entries += [
        {"policy": "streaming", "budget_tokens": 0, "num_recent_tokens": tokens - sink}
        for tokens in found.streaming
    ]
    grid: dict[str, dict[str, Any]] = {}
    unnamed: dict[str, dict[str, Any]] = {}
    for values in entries:
        selection = _checked(path, values, device)
        name, own = setting_name(selection), _unnamed(selection)
        if unnamed.setdefault(name, own) != own:
            key = next(key for key in own if own[key] != unnamed[name].get(key))
            raise SettingsError(
                f"--grid {path}: two entries are both {name}, which has no place for {key}, in "
                "which they differ; measure one of them from a grid of its own, into another --out"
            )
        grid.setdefault(name, values)
    return grid


def _unnamed(selection: SelectionSettings) -> dict[str, Any]:
    """Return the settings that the policy reads and `setting_name` does not tell."""
    return read_by(selection.policy, selection.model_dump(exclude=_IN_NAME))


def _joined(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Add what holds for all entries, without what an entry's policy never reads."""
    try:
        return read_by(str(values.get("policy", base.get("policy", DEFAULT_POLICY))), base, values)
    except PolicyError:
        return {**base, **values}  # no policy, as whoever checks it says


def read_yaml(path: Path, option: str) -> Any:
    """Return what a file holds that was given as `option`; raises `SettingsError`."""
    try:
        return load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise SettingsError(f"{option} {path}: cannot be read ({detail})") from error


def _product(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = list(entry)
    lists = [value if isinstance(value, list) else [value] for value in entry.values()]
    return [_entered(dict(zip(names, values, strict=True))) for values in itertools.product(*lists)]


def _entered(values: dict[str, Any]) -> dict[str, Any]:
    """Put in what texts stand for: ``K/16`` for a cap, ``none`` and ``0,1`` for layers."""
    budget = values.get("budget_tokens", SelectionSettings().budget_tokens)
    share = _SHARE_OF_K.fullmatch(str(values.get("fetch_cap", "")))
    if share and isinstance(budget, int):
        values["fetch_cap"] = max(1, budget // int(share[1] or 1))
    layers = values.get("exact_layers")
    if isinstance(layers, str):
        texts = [] if layers.strip().lower() == "none" else layers.split(",")
        # Numbers, as everywhere: a report of the settings must read back as the same.
        values["exact_layers"] = [_number(text.strip()) for text in texts]
    elif isinstance(layers, int):
        values["exact_layers"] = [layers]
    return values


def _number(text: str) -> int | str:
    """Return a number, or the text as it is: checking the settings refuses that in words."""
    return int(text) if text.isdecimal() else text


def _checked(path: Path, values: Mapping[str, Any], device: str) -> SelectionSettings:
    given = ", ".join(f"{key}={value}" for key, value in values.items())
    unknown = sorted(values.keys() - SelectionSettings.model_fields.keys())
    if unknown:
        raise SettingsError(
            f"--grid {path}: {unknown[0]} is no setting of the group selection; "
            "`tandemkv serve --print-settings` has all"
        )
    try:
        return on_device(resolve_selection(values), device)
    except PolicyError as error:
        raise SettingsError(f"--grid {path}: {given}: {error}") from error
    except ValidationError as error:
        raise SettingsError(f"--grid {path}: {given}: {explained(error, 'selection')}") from error


def explained(error: ValidationError, whole: str) -> str:
    """Return what is wrong, with the key of each setting, or `whole` for all of them together."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or whole}: {item['msg'].removeprefix('Value error, ')}"
        for item in error.errors(include_url=False)
    )


def setting_name(selection: SelectionSettings) -> str:
    """Return the name, e.g. ``k1024-c2-cap64-s128-int4-xnone``.

    K, c, fetch cap, sample tokens, index and exact layers; a policy other than the default comes
    first. A policy that keeps the sink alone is named by its tokens: ``streaming-2176``. Nothing of
    `selection` is left open (`resolve_placement`).
    """
    if selection.declared.keeps_sink_only:
        return f"{selection.policy}-{selection.row_tokens}"
    policy = "" if selection.policy == DEFAULT_POLICY else f"{selection.policy}-"
    exact = ".".join(map(str, selection.exact_layer_ids)) or "none"
    return (
        f"{policy}k{selection.budget_tokens}-c{selection.resident_factor:g}"
        f"-cap{selection.fetch_cap_tokens}-s{selection.num_samples}"
        f"-{selection.index_dtype}-x{exact}"
    )


def is_setting_name(text: str) -> bool:
    """Whether `setting_name` makes such names."""
    return bool(_NAME.fullmatch(text) or _RING_ONLY.fullmatch(text))


def describe_setting(name: str) -> str:
    """Return a name of `setting_name` as a person reads it; another text as it is."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name.replace("streaming-", "streaming, ") if _RING_ONLY.fullmatch(name) else name
    parts = [
        f"K {found['k']}", f"c {found['c']}", f"cap {found['cap']}",
        f"{found['samples']} samples" if found["samples"] != "0" else "no samples",
        found["index"],
    ]  # fmt: skip
    if found["exact"] != "none":
        parts.append(f"layers {found['exact'].replace('.', ', ')} exact")
    if found["policy"]:
        parts.insert(0, found["policy"])
    return ", ".join(parts)
