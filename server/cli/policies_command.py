# SPDX-License-Identifier: Apache-2.0
"""``tandemkv policies``: the policies, and the options of each."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from tandemkv.cache_rank.policies.base import Policy
    from tandemkv.cache_rank.policies.options import OptionText


def policies(
    name: Annotated[
        str | None, typer.Argument(help="One policy, or module:Class of your own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the policies, or show what one does and its options with their defaults."""
    from tandemkv.cache_rank.policies.registry import POLICIES

    if as_json:
        names = POLICIES if name is None else [name]
        typer.echo(json.dumps({each: _as_json(each) for each in names}, indent=2))
    else:
        shown = _overview(POLICIES) if name is None else _details(name)
        Console(highlight=False).print(shown)


def _read(name: str) -> tuple[type[Policy], str, list[OptionText]]:
    """Return a policy, what it does, and its options; `SettingsError` if there is none."""
    from tandemkv.cache_rank.policies.options import describe_options
    from tandemkv.cache_rank.policies.registry import find_policy

    policy = find_policy(name)
    summary = (policy.__doc__ or "").strip().partition("\n")[0].replace("`", "")
    return policy, summary, describe_options(policy.options_model)


def _as_json(name: str) -> dict[str, Any]:
    policy, summary, options = _read(name)
    defaults = policy.options_model().model_dump(mode="json")
    return {
        "summary": summary,
        "devices": list(policy.capabilities.devices),
        "options": {
            option.name: {
                "accepted": option.accepted,
                "default": defaults[option.name],
                "help": option.help,
            }
            for option in options
        },
    }


def _overview(names: Iterable[str]) -> Group:
    table = _table("policy", "what it does", "options")
    for name in names:
        _, summary, options = _read(name)
        table.add_row(name, Text(summary), ", ".join(option.name for option in options))
    return Group(table, "`tandemkv policies NAME` shows a policy's options and their defaults.")


def _details(name: str) -> Group:
    policy, summary, options = _read(name)
    title = Text(f"{name}: {summary}")
    where = Text(f"runs on {', '.join(policy.capabilities.devices)}")
    if not options:
        return Group(title, where, "It has no options of its own.")
    table = _table("option", "accepted", "default", "meaning")
    for option in options:
        table.add_row(*map(Text, option))
    return Group(title, where, table, Text(f"Give them as --set {name}.{options[0].name}=VALUE."))


def _table(*columns: str) -> Table:
    folded = (Column(name, overflow="fold") for name in columns)
    return Table(*folded, box=box.SIMPLE_HEAD, pad_edge=False)
