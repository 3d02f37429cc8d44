# SPDX-License-Identifier: Apache-2.0
"""Commands whose options are the fields of a request, so that each option is declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import typer

R = TypeVar("R")


def option(text: str = "", *names: str, **limits: Any) -> Any:
    """Return what a field's annotation holds: help `text`, typer's limits and metavar.

    The option's name is the field's, unless `names` say otherwise.
    """
    return typer.Option(*names, help=text or None, **limits)


def takes(request: type[R]) -> Callable[[Callable[[R], None]], Callable[..., None]]:
    """Return what makes a typer command of a function that takes a request.

    Each field of the dataclass `request` is annotated with ``Annotated[..., option(...)]``. The
    command has the name and the help text of the function.
    """
    signature = inspect.signature(request, eval_str=True)

    def decorate(function: Callable[[R], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            function(request(**given))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {x.name: x.annotation for x in signature.parameters.values()}
        return command

    return decorate
