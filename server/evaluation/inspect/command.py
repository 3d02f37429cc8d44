# SPDX-License-Identifier: Apache-2.0
"""The command ``tandemkv inspect``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tandemkv.server.evaluation.request_options import option
from tandemkv.server.evaluation.result_file import check_result_file
from tandemkv.server.settings.flags import RANK_FLAGS, ROW_FLAGS, with_flags
from tandemkv.server.settings.sources import Sourced, load_settings

_FLAGS = tuple(flag for flag in (*RANK_FLAGS, *ROW_FLAGS) if flag.key != "max_running_requests")
"""There is one request."""


@with_flags(_FLAGS)
def inspect(
    flags: dict[str, Sourced],
    model: Annotated[str, typer.Argument(help="Model directory, or smollm2 (embedded).")],
    prompt_file: Annotated[Path, option("The prompt, as plain text.", exists=True)],
    out: Annotated[Path, option("The page.")] = Path("inspect.html"),
    max_new_tokens: Annotated[int, option("Decode steps.", min=1, max=4096)] = 48,
    config: Annotated[Path | None, option("YAML file with settings.", metavar="FILE")] = None,
) -> None:
    """Show which tokens each layer and head selects for one prompt, as one HTML page.

    Serves the prompt once, with the given settings, and records every decode step.
    """
    from tandemkv.server.evaluation.corpus import read_text

    from .run import inspect_prompt

    check_result_file(out, "--out")
    flags["model"] = Sourced(model, "MODEL")
    settings = load_settings(flags, os.environ, config)
    text = read_text(prompt_file, "--prompt-file")
    console = Console(stderr=True, highlight=False)
    with console.status(f"serving the prompt with {settings.selection.policy} ..."):
        found = inspect_prompt(settings, text, max_new_tokens=max_new_tokens)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(found.html, encoding="utf-8")
    size = len(found.html.encode()) / 1e6
    console.print(f"{found.steps} steps of a prompt of {found.prompt_tokens} tokens, {size:.1f} MB")
    typer.echo(str(out))
