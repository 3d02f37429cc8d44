# SPDX-License-Identifier: Apache-2.0
"""Merge settings: flags over environment over YAML over defaults. Errors name key and source."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.rank_settings import DEFAULT_POLICY

from .launch_settings import ServeSettings
from .policy_options import (
    GROUP,
    collect_options,
    option_names,
    options_in,
    options_tree,
    split_option,
)
from .yaml_text import RepeatedKeyError, load_yaml

_LAYER_LISTS = ("selection.exact_layers", "selection.anchors")
_DECIDED = "placement"
_ENTERED = ("selection.declared", "selection.options", _DECIDED)
"""What a policy's class says, its options, which have names of their own, and what is decided."""

ENVIRONMENT_PREFIX = "TANDEMKV_SERVE_"


class Sourced(NamedTuple):
    """A value and where it came from, e.g. ``--port`` or ``serve.yaml``."""

    value: Any
    source: str


def setting_fields(model: type[BaseModel] = ServeSettings, prefix: str = "") -> dict[str, Any]:
    """Dotted name of every setting to its pydantic field."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if f"{prefix}{name}" in _ENTERED:
            continue
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields.update(setting_fields(field.annotation, f"{prefix}{name}."))
        else:
            fields[f"{prefix}{name}"] = field
    return fields


def load_settings(
    flags: Mapping[str, Sourced],
    environ: Mapping[str, str],
    config: Path | None = None,
    *,
    otherwise: Mapping[str, Sourced] | None = None,
) -> ServeSettings:
    """Return the settings, merged and checked.

    `flags` maps dotted names to values given on the command line. Of `environ` the variables that
    begin with ``TANDEMKV_SERVE_`` count; `config` is a YAML file. `otherwise` has values of
    settings that none of these names. Raises `SettingsError` if a key is unknown or a value is
    wrong; the message names the key and its source.
    """
    in_file = _from_yaml(config) if config is not None else {}
    merged = dict(otherwise or {}) | in_file | _from_environment(environ) | dict(flags)
    tree: dict[str, Any] = {}
    options = {key: merged.pop(key) for key in list(merged) if key.startswith(f"{GROUP}.")}
    for key, (value, source) in merged.items():
        *groups, name = key.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = _normalise(key, value, source)
    if options:
        policy, _ = merged.get("selection.policy", (DEFAULT_POLICY, ""))
        found = collect_options(options, str(policy), optional=in_file)
        tree.setdefault("selection", {})["options"] = found
    try:
        return ServeSettings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_explain(error, merged)) from None


_OPEN_UNLESS_SET = ("index_dtype", "num_recent_tokens")
"""Of a selection what the devices decide where nobody has set it; the defaults are a CPU's."""


def to_yaml(settings: ServeSettings) -> str:
    """Return the settings as YAML that ``--config`` reads back; what is open stays open."""
    tree = settings.model_dump(mode="json")
    for name in ("declared", "options"):
        del tree["selection"][name]
    if settings.placement is None:
        del tree[_DECIDED]
    if "tensor_parallel" not in settings.model_fields_set:
        del tree["tensor_parallel"]
    for name in _OPEN_UNLESS_SET:
        if name not in settings.selection.model_fields_set:
            del tree["selection"][name]
    tree[GROUP] = options_tree(settings.selection)
    return yaml.safe_dump(tree, sort_keys=False)


def _from_yaml(path: Path) -> dict[str, Sourced]:
    try:
        tree = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config {path}: cannot be read ({error.strerror})") from error
    except RepeatedKeyError as error:
        raise SettingsError(f"--config {path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise SettingsError(f"--config {path}: not valid YAML ({where})") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise SettingsError(f"--config {path}: a mapping of settings is required")
    found: dict[str, Sourced] = {}
    for key, value in _flat(tree, "", str(path)):
        if key in found:  # with its dotted name, and in its group
            raise SettingsError(f"--config {path}: {key} is given twice; leave one of them out")
        found[key] = Sourced(value, str(path))
    return found


def _flat(tree: Mapping[Any, Any], prefix: str, source: str) -> Iterator[tuple[str, Any]]:
    groups = {key.rpartition(".")[0] for key in setting_fields()} - {""}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key == GROUP:
            yield from options_in(value, source).items()
        elif key in groups:
            if not isinstance(value, dict):
                raise SettingsError(f"{key} (from {source}): a group of settings is required")
            yield from _flat(value, f"{key}.", source)
        else:
            if key != _DECIDED:  # in the file that `serve` writes for the cache rank
                require_known(key, source)
            yield key, value


def _from_environment(environ: Mapping[str, str]) -> dict[str, Sourced]:
    found: dict[str, Sourced] = {}
    for variable in sorted(environ):
        if variable.startswith(ENVIRONMENT_PREFIX):
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            values: dict[str, Any] = {key: environ[variable]}
            if key == GROUP:
                values = options_in(environ[variable], variable)
            elif not key.startswith(f"{GROUP}."):
                require_known(key, variable)
            found |= {name: Sourced(value, variable) for name, value in values.items()}
    return found


def read_assignments(texts: Sequence[str]) -> dict[str, Sourced]:
    """Return what ``--set`` was given: ``policy.option=value``, or a setting's dotted name.

    Raises `SettingsError` if a text is none of both; with the name that may be meant.
    """
    found: dict[str, Sourced] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        name, source = name.strip(), f"--set {name.strip()}"
        if not separator:
            raise SettingsError(f"--set {text}: NAME=VALUE is required, e.g. sfi.max_interval=8")
        option = None if name in setting_fields() else split_option(name)
        if option is None:
            require_known(name, source)
        found[name if option is None else option.key] = Sourced(value, source)
    return found


def require_known(key: str, source: str) -> None:
    """Refuse what is no setting.

    Raises `SettingsError`, with the setting that may be meant.
    """
    known = setting_fields()
    if key in known:
        return
    names = [*known, *option_names()]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    near = near or [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
    hint = f"did you mean {near[0]}?" if near else "`tandemkv serve --print-settings` lists all"
    raise SettingsError(f"unknown setting {key} (from {source}); {hint}")


def _normalise(key: str, value: Any, source: str) -> Any:
    """Read the text forms of lists and of "not set"."""
    if not isinstance(value, str):
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return (value,) if is_number and key in _LAYER_LISTS else value
    if key in (*_LAYER_LISTS, "edge.cors_origins"):
        if value.strip().lower() in ("none", ""):
            return ()
        parts = value.split(",")
        return tuple(parts if key == "edge.cors_origins" else map(str.strip, parts))
    if key == "sglang_args":
        try:
            return tuple(shlex.split(value))
        except ValueError as error:
            raise SettingsError(f"sglang_args (from {source}): {error}") from error
    default = None if key == _DECIDED else setting_fields()[key].default
    is_unset = value.lower() == "none" and default is None
    return None if is_unset else value


def _explain(error: ValidationError, merged: Mapping[str, Sourced]) -> str:
    """One line per wrong setting: key, value, source, what is required."""
    lines: dict[str, None] = {}  # each once
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
        message = item["msg"].removeprefix("Value error, ")
        if key == "model" and item["type"] == "missing":
            line = (
                "no model given: `tandemkv serve MODEL`, with other commands --model MODEL; a "
                "model directory or smollm2"
            )
        elif key in merged:
            line = f"{key}={merged[key].value} (from {merged[key].source}): {message}"
        else:  # a check over several settings
            given = [
                f"{name} from {value.source}"
                for name, value in merged.items()
                if name.startswith(f"{key}." if key else "") and name.split(".")[-1] in message
            ]
            line = f"{message} ({', '.join(given)})" if given else message
            line = f"{key}: {line}" if key else line
        lines[line] = None
    return "; ".join(lines)
