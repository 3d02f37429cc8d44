# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of the settings: one table, from which help and parsing are made.

Flags are read as text; the settings models convert and check them, so that a wrong value
is reported the same way whether it came from a flag, the environment or a file.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from pydantic.fields import FieldInfo

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.frozen_model import required_type
from tandemkv.cache_rank.protocol.settings.token_count import COUNTED
from tandemkv.server.evaluation.request_options import option

from .sources import Sourced, read_assignments, setting_fields


class Flag(NamedTuple):
    """A command-line flag, the dotted name of its setting, and the group of the help it is in.

    ``--help`` shows those of the `COMMON` groups, ``--help-all`` the others too.
    """

    name: str
    key: str
    panel: str

    @property
    def is_common(self) -> bool:
        """Whether ``--help`` shows it."""
        return self.panel in COMMON


SERVER = "Server"
PLACEMENT = "Where it runs"
CAPACITY = "How much it holds"
SELECTION = "What is attended to"
OPERATION = "For operators: start, restart and shutdown"
REQUESTS = "For operators: bounds of requests"
RESIDENT = "For tuning: the resident set and its selection"
SHARING = "For tuning: layers that share selections"
NODES = "For several hosts: SGLang's processes on each"
LINK = "For tuning: the link between the ranks"
TESTS = "For developers: evaluation and tests"
COMMON = (SERVER, PLACEMENT, CAPACITY, SELECTION)
SWITCH = " "
"""The metavar of an option that takes no value."""


def _flags(panel: str, group: str, names: str) -> tuple[Flag, ...]:
    """``flag=field`` pairs, or ``field`` alone where only the hyphens differ."""
    flags = []
    for name in names.split():
        flag, _, field = name.partition("=")
        key = field or flag.replace("-", "_")
        flags.append(Flag(f"--{flag}", f"{group}.{key}" if group else key, panel))
    return tuple(flags)


ROW_FLAGS: tuple[Flag, ...] = (
    *_flags(PLACEMENT, "", "device dtype"),
    *_flags(LINK, "", "transport link-keys"),
    *_flags(CAPACITY, "", "max-context max-running-requests"),
)
RANK_FLAGS: tuple[Flag, ...] = (
    *_flags(CAPACITY, "cache", "cache-tokens=capacity_tokens kv-cache-dtype=kv_dtype"),
    *_flags(SELECTION, "selection", "policy budget-tokens resident-factor index-dtype"),
    *_flags(
        RESIDENT, "selection",
        "sink-tokens=num_sink_tokens recent-tokens=num_recent_tokens sample-tokens fetch-cap "
        "index-channels exact-layers late-layers predictor-dtype refresh-every seed-window "
        "pooling pool-before pool-after dense-tokens dense-batch-tokens",
    ),
    *_flags(SHARING, "selection", "share-layers anchors calibration"),
    *_flags(
        LINK, "exchange",
        "transfer-timeout-s heartbeat-interval-s heartbeat-misses recovery-timeout-s",
    ),
    *_flags(TESTS, "", "evaluation stress-selection"),
    *_flags(TESTS, "selection", "dense-while-fits"),
)  # fmt: skip
DRAIN_FLAGS = _flags(OPERATION, "", "drain-timeout-s")
STANDBY_FLAGS = _flags(OPERATION, "", "standby")
EDGE_FLAGS: tuple[Flag, ...] = (
    *_flags(SERVER, "edge", "api-key-file"),
    *_flags(
        REQUESTS, "edge",
        "admin-key-file cors-origins max-queued-requests max-body-bytes max-prompt-bytes "
        "max-json-depth body-timeout-s max-n max-logprobs max-stops max-stop-bytes "
        "max-grammar-bytes",
    ),
)  # fmt: skip
SERVE_FLAGS: tuple[Flag, ...] = (
    *_flags(SERVER, "", "host port allow-remote"),
    *(flag for flag in EDGE_FLAGS if flag.is_common),
    *_flags(PLACEMENT, "", "cache-ranks tp=tensor_parallel"),
    *_flags(SELECTION, "", "calibrated"),
    *_flags(LINK, "", "cache-rank-address"),
    *_flags(NODES, "", "nnodes node-rank dist-init-addr"),
    *ROW_FLAGS,
    *RANK_FLAGS,
    *_flags(OPERATION, "", "start-timeout-s"),
    *DRAIN_FLAGS,
    *_flags(OPERATION, "", "hang-timeout-s max-restarts standby run-dir chunked-prefill-size"),
    *(flag for flag in EDGE_FLAGS if not flag.is_common),
)

_SUPERVISION = {"run_dir", "hang_timeout_s", "max_restarts", "standby"}
INFERENCE_FLAGS = tuple(
    flag for flag in SERVE_FLAGS if flag.key not in _SUPERVISION and flag.panel != NODES
)

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_SET_PARAMETER, _ALL_PARAMETER = "assignments", "help_all"
SetOption = Annotated[
    list[str] | None,
    option(
        "An option of a policy, e.g. sfi.max_interval=8 (`tandemkv policies` lists them), or any "
        "setting by its dotted name, e.g. selection.fetch_cap=256. May be repeated.",
        "--set",
        metavar="NAME=VALUE",
        rich_help_panel=SELECTION,
    ),
]


def _show_all(ctx: typer.Context, param: Any, value: bool) -> None:
    """Print the help with every option, and end."""
    del param
    if not value:
        return
    hidden: list[Any] = [item for item in ctx.command.params if getattr(item, "hidden", False)]
    for item in hidden:
        item.hidden = False
    try:
        typer.echo(ctx.get_help(), nl=False)
    finally:
        for item in hidden:
            item.hidden = True
    raise typer.Exit


_SHOW_ALL = "Show all options and exit."
AllOption = Annotated[
    bool, option(_SHOW_ALL, "--help-all", callback=_show_all, is_eager=True, metavar=SWITCH)
]


def with_flags(
    flags: Sequence[Flag], texts: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add `flags`, ``--set`` and ``--help-all`` to a command.

    It declares ``flags: dict[str, Sourced]``, which gets what was given; typer sees one option per
    flag instead. `texts` are the command's own in the help, default included, by the setting's key.
    """
    own_texts = texts or {}
    ordered = sorted(flags, key=lambda flag: not flag.is_common)  # as the help lists them
    parameters = {flag.name[2:].replace("-", "_"): flag for flag in ordered}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**arguments: Any) -> None:
            del arguments[_ALL_PARAMETER]
            given: dict[str, Sourced] = {}
            for name, flag in parameters.items():
                value = arguments.pop(name, None)
                if value is not None:
                    given[flag.key] = Sourced(value, flag.name)
            for key, sourced in read_assignments(arguments.pop(_SET_PARAMETER) or ()).items():
                if key in given:
                    raise SettingsError(
                        f"{given[key].source} and {sourced.source} set the same; give one of them"
                    )
                given[key] = sourced
            function(flags=given, **arguments)

        signature = inspect.signature(function, eval_str=True)
        own = [item for item in signature.parameters.values() if item.name != "flags"]
        hints = {name: _annotation(x, own_texts.get(x.key)) for name, x in parameters.items()}
        visible = [
            *(item.replace(kind=_KEYWORD) for item in own),
            inspect.Parameter(_ALL_PARAMETER, _KEYWORD, default=False, annotation=AllOption),
            *(
                inspect.Parameter(name, _KEYWORD, default=None, annotation=hint)
                for name, hint in (hints | {_SET_PARAMETER: SetOption}).items()
            ),
        ]
        command.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
        command.__annotations__ = {item.name: item.annotation for item in visible}
        del command.__wrapped__
        return command

    return decorate


def _annotation(flag: Flag, own_text: str | None) -> Any:
    field: FieldInfo = setting_fields()[flag.key]
    default = _default_text(field) if own_text is None else ""
    notes = "; ".join(filter(None, (_choices(field), default)))
    text = (own_text or field.description or "") + (f" [{notes}]" if notes else "")
    is_switch = field.annotation is bool
    # Of a switch that is off by default the short help has no room for --no-...
    has_no = is_switch and field.default
    shown = option(
        text.replace("[", r"\["),
        f"{flag.name}/--no-{flag.name[2:]}" if has_no else flag.name,
        metavar=SWITCH if is_switch else _metavar(field),
        rich_help_panel=flag.panel,
        hidden=not flag.is_common,
    )
    return Annotated[bool | None, shown] if is_switch else Annotated[str | None, shown]


def _default_text(field: FieldInfo) -> str:
    """Return the default; nothing where it is open or told, or a switch that is off."""
    default = field.default
    if default is None or default is False or "Default:" in (field.description or ""):
        return ""
    if isinstance(default, tuple):
        return f"default: {','.join(map(str, default)) or 'none'}"
    return f"default: {str(default).lower() if isinstance(default, bool) else default}"


def _choices(field: FieldInfo) -> str:
    """Return the values that there are to choose from, if they are few."""
    hint = required_type(field.annotation)
    if typing.get_origin(hint) is not Literal:
        return ""
    *others, last = map(str, typing.get_args(hint))
    return f"{', '.join(others)} or {last}"


def _metavar(field: FieldInfo) -> str:
    hint: Any = field.annotation
    inner = (getattr(item, "__metadata__", ()) for item in typing.get_args(hint))
    if any(COUNTED in metadata for metadata in (field.metadata, *inner)):
        return "TOKENS"
    hint = required_type(hint)
    if typing.get_origin(hint) is Literal:
        return "CHOICE"
    if typing.get_origin(hint) is tuple:
        return "0,1|none" if int in typing.get_args(hint) else "A,B|none"
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(hint, "TEXT")
