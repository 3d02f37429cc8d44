# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of the settings: one table, from which help and parsing are made.

Flags are read as text; the settings models convert and check them, so that a wrong value
is reported the same way whether it came from a flag, the environment or a file.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import typer
from pydantic.fields import FieldInfo

from tandemkv.cache_rank.protocol.token_count import COUNTED

from .settings_sources import Sourced, setting_fields


class Flag(NamedTuple):
    """A command-line flag and the dotted name of its setting."""

    name: str
    key: str
    panel: str


def _flags(panel: str, group: str, names: str) -> tuple[Flag, ...]:
    """``flag=field`` pairs, or ``field`` alone where only the hyphens differ."""
    flags = []
    for name in names.split():
        flag, _, field = name.partition("=")
        key = field or flag.replace("-", "_")
        flags.append(Flag(f"--{flag}", f"{group}.{key}" if group else key, panel))
    return tuple(flags)


RANK_FLAGS: tuple[Flag, ...] = (
    *_flags(
        "Selection", "selection",
        "policy budget-tokens resident-factor sink-tokens=num_sink_tokens "
        "recent-tokens=num_recent_tokens sample-tokens fetch-cap index-dtype exact-layers "
        "look-ahead-layers late-layers predictor-dtype "
        "refresh-every seed-window pooling pool-before pool-after "
        "dense-while-fits dense-tokens dense-batch-tokens "
        "quest-page-tokens ridge-window ridge-eps "
        "lfps-rows lfps-decay lfps-sparsity lfps-threshold lfps-bypass "
        "ridge-sign ridge-normalise ridge-unrotate "
        "calibration anchors share-layers kascade-fraction "
        "sfi-max-interval sfi-triggers sfi-window sfi-alpha sfi-norm-exponent sfi-decay "
        "sfi-decay-power sfi-tail-brake sfi-lambda-clip sfi-nms sfi-nms-radius sfi-cross "
        "sfi-temperature sync-stride sync-static sync-union",
    ),
    *_flags(
        "Exchange between the ranks", "exchange",
        "transfer-timeout-s heartbeat-interval-s heartbeat-misses recovery-timeout-s transport",
    ),
    *_flags("Cache rank", "cache", "cache-tokens=capacity_tokens"),
    *_flags("Evaluation", "", "evaluation stress-selection"),
)  # fmt: skip
DRAIN_FLAGS = _flags("Server", "", "drain-timeout-s")
STANDBY_FLAGS = _flags("Server", "", "standby")
EDGE_FLAGS = _flags(
    "Requests", "edge",
    "api-key-file admin-key-file cors-origins max-queued-requests max-body-bytes max-prompt-bytes "
    "max-json-depth body-timeout-s max-n max-logprobs max-stops max-stop-bytes max-grammar-bytes",
)  # fmt: skip
ROW_FLAGS = _flags("Server", "", "cache-device max-running-requests max-context dtype")
SERVE_FLAGS: tuple[Flag, ...] = (
    *_flags("Server", "", "host port allow-remote device cache-ranks tp=tensor_parallel"),
    *ROW_FLAGS,
    *_flags(
        "Server",
        "",
        "chunked-prefill-size start-timeout-s drain-timeout-s hang-timeout-s max-restarts standby "
        "run-dir",
    ),
    *EDGE_FLAGS,
    *RANK_FLAGS,
)

_SUPERVISION = {"run_dir", "hang_timeout_s", "max_restarts", "standby"}
INFERENCE_FLAGS = tuple(flag for flag in SERVE_FLAGS if flag.key not in _SUPERVISION)


def with_flags(flags: Sequence[Flag]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add `flags` to a typer command; it gets what was given as the argument ``flags``.

    The command declares ``flags: dict[str, Sourced]``; typer sees one option per flag instead.
    """
    parameters = {flag.name[2:].replace("-", "_"): flag for flag in flags}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**arguments: Any) -> None:
            given: dict[str, Sourced] = {}
            for name, flag in parameters.items():
                value = arguments.pop(name, None)
                if value is not None:
                    given[flag.key] = Sourced(value, flag.name)
            function(flags=given, **arguments)

        signature = inspect.signature(function, eval_str=True)
        own = [item for item in signature.parameters.values() if item.name != "flags"]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in ((name, _annotation(flag)) for name, flag in parameters.items())
        ]
        keyword = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own]
        visible = [*keyword, *added]
        command.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
        command.__annotations__ = {item.name: item.annotation for item in visible}
        del command.__wrapped__
        return command

    return decorate


def _annotation(flag: Flag) -> Any:
    field: FieldInfo = setting_fields()[flag.key]
    default = _default_text(field)
    text = field.description or ""
    if field.default is not None:
        text += f" [default: {default}]"
    text = text.replace("[", r"\[")
    if field.annotation is bool:
        # Of a switch that is off by default the short help has no room for --no-...
        names = f"{flag.name}/--no-{flag.name[2:]}" if field.default else flag.name
        return Annotated[bool | None, typer.Option(names, help=text, rich_help_panel=flag.panel)]
    return Annotated[
        str | None,
        typer.Option(flag.name, help=text, metavar=_metavar(field), rich_help_panel=flag.panel),
    ]


def _default_text(field: FieldInfo) -> str:
    default = field.default
    if isinstance(default, tuple):
        return ",".join(str(item) for item in default) or "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _metavar(field: FieldInfo) -> str:
    hint: Any = field.annotation
    origin = typing.get_origin(hint)
    inner = (getattr(item, "__metadata__", ()) for item in typing.get_args(hint))
    if any(COUNTED in metadata for metadata in (field.metadata, *inner)):
        return "TOKENS"
    if origin in (typing.Union, types.UnionType):
        hint = next(item for item in typing.get_args(hint) if item is not type(None))
    if typing.get_origin(hint) is Literal:
        return "|".join(str(item) for item in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "0,1|none" if int in typing.get_args(hint) else "A,B|none"
    return {int: "INTEGER", float: "NUMBER"}.get(hint, "TEXT")
