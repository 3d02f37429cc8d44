# SPDX-License-Identifier: Apache-2.0
"""How commands report errors, and how ``serve`` takes arguments for SGLang."""

from __future__ import annotations

import select
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from tandemkv.cache_rank.protocol.errors import SettingsError, TandemKVError, UnsupportedModelError
from tandemkv.server.evaluation.request_options import option
from tandemkv.server.settings.flags import SWITCH
from tandemkv.server.settings.launch_settings import EMBEDDED_MODEL
from tandemkv.server.settings.sources import Sourced

_PASSED_THROUGH = "tandemkv.passed_through"

EPILOG = "What follows -- goes to SGLang unchanged. --help-all shows all options."
ModelArgument = Annotated[
    str | None, typer.Argument(help=f"Model directory, or {EMBEDDED_MODEL} (embedded).")
]
ConfigOption = Annotated[
    Path | None, option("YAML file with settings.", "--config", metavar="FILE")
]
VerboseOption = Annotated[
    bool, option("Show the logs of both ranks.", "--verbose", "-v", metavar=SWITCH)
]


class _Reporting:
    """Turns errors into one line on stderr and an exit code: 2 for bad input, 1 for a failure.

    Mixed into a command of click's.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; ``--debug`` shows tracebacks."""
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except (typer.Exit, typer.Abort):
            raise
        except TandemKVError as error:
            self._report(ctx, str(error))
            is_input = isinstance(error, SettingsError | UnsupportedModelError)
            raise typer.Exit(2 if is_input else 1) from error
        except KeyboardInterrupt as error:
            self._report(ctx, "interrupted")
            raise typer.Exit(130) from error
        except (OSError, ImportError, ValueError, RuntimeError, TypeError, LookupError) as error:
            if isinstance(error, BrokenPipeError) and _is_unread(sys.stdout):
                raise  # as with `| head`: click ends with 1, and says nothing
            text = " ".join(str(error).split()) or "no further message"
            self._report(ctx, f"{type(error).__name__}: {text}; `tandemkv --debug` shows where")
            raise typer.Exit(1) from error

    @staticmethod
    def _report(ctx: Any, message: str) -> None:
        if ctx.params.get("debug"):
            typer.echo(traceback.format_exc(), err=True, nl=False)
        typer.echo(f"tandemkv: error: {message}", err=True)


def _is_unread(stream: TextIO) -> bool:
    """Whether `stream` is a pipe whose reader has gone."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


_METAVARS = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "path": "PATH", "bool": SWITCH}
"""What options are shown to take, in the style of our own, by the names that typer has."""


class ReportingGroup(_Reporting, TyperGroup):
    """A command of commands that reports errors in one line."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options before the command, whose help shows types likewise."""
        params: list[Any] = super().get_params(ctx)
        for item in params:
            _show_type(item, ctx)
        return params

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, whose help shows types as that of the settings does."""
        command = super().get_command(ctx, cmd_name)
        for each in (command, *getattr(command, "commands", {}).values()):
            for item in [] if each is None else each.get_params(ctx):
                _show_type(item, ctx)
        return command


def _show_type(item: Any, ctx: Any) -> None:
    """Replace what typer from 0.29 on shows in angle brackets; an argument keeps its own name."""
    show = getattr(item, "display_type_rich", None)
    if item.metavar is not None or show is None:
        return
    name = str(show(ctx)).strip("<>").removeprefix("list[").partition("]")[0]
    name = name.removesuffix(" range")
    text = name if "|" in name else _METAVARS.get(name.lower())
    if text is None:
        return
    if item.param_type_name == "argument":
        item.display_type_rich = lambda ctx: text
    else:
        item.metavar = text


class ServeCommand(TyperCommand):
    """Keeps what follows ``--`` away from the parser."""

    passed_to = "SGLANG"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what precedes ``--``."""
        own = args
        if "--" in args:
            split = args.index("--")
            own, ctx.meta[_PASSED_THROUGH] = args[:split], tuple(args[split + 1 :])
        return super().parse_args(ctx, list(own))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Show the part after ``--`` in the usage line."""
        return [*super().collect_usage_pieces(ctx), f"[-- {self.passed_to} ARGS]"]


class ReportingServeCommand(_Reporting, ServeCommand):
    """A command by itself, of its own module, that takes arguments for SGLang."""


def passed_through(ctx: typer.Context) -> tuple[str, ...]:
    """Return what followed ``--``."""
    found: tuple[str, ...] = ctx.meta.get(_PASSED_THROUGH, ())
    return found


def add_arguments(
    flags: dict[str, Sourced], ctx: typer.Context, model: str | None, source: str = "MODEL"
) -> None:
    """Add the model, if there is one, and what followed ``--``, to `flags`.

    `source` is what gave the model, for messages. Raises `SettingsError` if ``--set`` gave one of
    them as well.
    """
    added = {
        "model": Sourced(model, source),
        "sglang_args": Sourced(passed_through(ctx) or None, "the arguments after --"),
    }
    for key, given in added.items():
        if given.value is None:
            continue
        if key in flags:
            raise SettingsError(
                f"{given.source} and {flags[key].source} set the same; give one of them"
            )
        flags[key] = given
