# SPDX-License-Identifier: Apache-2.0
"""``tandemkv policies``: the policies, and the options of each."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text


def policies(
    name: Annotated[
        str | None, typer.Argument(help="One policy, or module:Class of your own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the policies, or show what one does and its options with their defaults."""
    console = Console(highlight=False)
    if as_json:
        names = _names() if name is None else [name]
        typer.echo(json.dumps({each: _described(each) for each in names}, indent=2))
    elif name is None:
        console.print(_overview())
    else:
        console.print(_details(name))


def _names() -> list[str]:
    from tandemkv.cache_rank.policies.registry import POLICIES

    return list(POLICIES)


def _described(name: str) -> dict[str, Any]:
    """Return what is known of a policy, as JSON has it.

    Raises `SettingsError` if there is no such policy.
    """
    from tandemkv.cache_rank.policies.options import describe_options
    from tandemkv.cache_rank.policies.registry import find_policy

    found = find_policy(name)
    capabilities = found.capabilities
    defaults = found.options_model().model_dump(mode="json")
    return {
        "summary": (found.__doc__ or "").strip().partition("\n")[0].replace("`", ""),
        "devices": list(capabilities.devices),
        "options": {
            option.name: {
                "accepted": option.accepted,
                "default": defaults[option.name],
                "help": option.help,
            }
            for option in describe_options(found.options_model)
        },
    }


def _overview() -> Group:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("policy", "what it does", "options"):
        table.add_column(title, overflow="fold")
    for name in _names():
        found = _described(name)
        table.add_row(name, Text(found["summary"]), ", ".join(found["options"]))
    return Group(table, "`tandemkv policies NAME` shows a policy's options and their defaults.")


def _details(name: str) -> Group:
    found = _described(name)
    where = Text(f"runs on {', '.join(found['devices'])}")
    title = Text(f"{name}: {found['summary']}")
    if not found["options"]:
        return Group(title, where, "It has no options of its own.")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("option", "accepted", "default", "meaning"):
        table.add_column(column, overflow="fold")
    from tandemkv.cache_rank.policies.options import describe_options
    from tandemkv.cache_rank.policies.registry import find_policy

    for option in describe_options(find_policy(name).options_model):
        table.add_row(
            Text(option.name), Text(option.accepted), Text(option.default), Text(option.help)
        )
    first = next(iter(found["options"]))
    return Group(title, where, table, Text(f"Give them as --set {name}.{first}=VALUE."))
