# SPDX-License-Identifier: Apache-2.0
"""What the user of ``tandemkv quality`` asks for."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.token_count import read_token_count
from tandemkv.server.evaluation.request_options import option
from tandemkv.server.evaluation.tokenizing import PromptStyle

LEAST_CONTEXT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Options of ``tandemkv quality``; names, settings and part are texts as given."""

    model: Annotated[str | None, typer.Argument(help="Model directory, or smollm2 (embedded).")] = (
        None
    )
    as_served: Annotated[
        bool,
        option("Measure what `tandemkv serve MODEL` would choose on this machine.", "--as-served"),
    ] = False
    grid: Annotated[
        Path | None, option("YAML of settings to measure; the rest is as served.", metavar="FILE")
    ] = None
    policies: Annotated[
        str | None,
        option(
            "Policies, separated by commas; dense is added. Settings and options of one follow it: "
            "look_ahead+fetch_cap=64+distance=2. Default look_ahead,streaming; none with "
            "--as-served or --grid."
        ),
    ] = None
    budgets: Annotated[
        str,
        option(
            "Tokens attended to per KV head, separated by commas: 512, or 12.5% of the context. "
            "Every policy gets the same."
        ),
    ] = "12.5%"
    tasks: Annotated[
        str | None,
        option(
            "Tasks, separated by commas; see below. Default perplexity,niah_single; with --pareto "
            "all of the report."
        ),
    ] = None
    samples: Annotated[int, option("Samples a task; texts for perplexity.", min=1)] = 8
    out: Annotated[Path, option("Folder of results; the same command resumes there.")] = Path(
        "quality"
    )
    context_tokens: Annotated[
        str,
        option("Length of the prompts. With several, e.g. 8k,32k, every task is asked at each."),
    ] = "4096"
    forced_tokens: Annotated[int, option("Tokens forced or continued a text.", min=17)] = 128
    long_tokens: Annotated[
        int, option("Tokens forced a text by the tasks long_generation*.", min=64)
    ] = 8000
    max_new_tokens: Annotated[
        int | None, option("Longest answer, instead of each task's own.", min=1)
    ] = None
    corpus: Annotated[
        list[Path] | None,
        option(
            "Text file, folder, JSON of texts, or package:NAME for the source of an installed "
            "package; may be repeated. Default: texts that come with Python and installed packages."
        ),
    ] = None
    prompt_style: Annotated[
        PromptStyle, option("Plain completion, or the model's chat template.")
    ] = "raw"
    seed: Annotated[int, option("Decides the samples.")] = 0
    jobs: Annotated[int, option("Servers at once; two to three cores each on cpu.", min=1)] = 1
    concurrency: Annotated[int, option("Requests at once, a server.", min=1, max=256)] = 4
    no_dense: Annotated[
        bool,
        option(
            "Leave stock SGLang out; what is compared is with its results in --out, if any.",
            "--no-dense",
        ),
    ] = False
    device: Annotated[Literal["auto", "cpu", "cuda"], option("As for serve.")] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], option("As for serve.")] = (
        "auto"
    )
    settings: Annotated[
        list[str] | None,
        option(
            "An option of a policy, or any setting of serve by its dotted name, e.g. "
            "selection.exact_layers=0. May be repeated.",
            "--set",
            metavar="NAME=VALUE",
        ),
    ] = None
    config: Annotated[Path | None, option("YAML settings of serve.", metavar="FILE")] = None
    dense_args: Annotated[
        str, option("More arguments of stock SGLang, e.g. '--attention-backend flashinfer'.")
    ] = ""
    samples_from: Annotated[
        Path | None,
        option(
            "Ask the prompts of another --out; lengths, seed and corpus are those.", metavar="DIR"
        ),
    ] = None
    part: Annotated[
        str | None,
        option(
            "Ask every N-th sample from the I-th on; tests/bench/quality_merge.py joins.",
            metavar="I/N",
        ),
    ] = None
    samples_only: Annotated[
        bool, option("Write samples/ and stop: nothing is started.", "--samples-only")
    ] = False
    compare: Annotated[
        tuple[Path, Path] | None,
        option("Show the differences of two report.json, or of their folders.", metavar="A B"),
    ] = None
    pareto: Annotated[
        tuple[Path, Path] | None,
        option(
            "Draw loss against ms a step, of a report.json and a report of `bench decode`, as "
            "pareto.svg and .png in --out.",
            metavar="QUALITY DECODE",
        ),
    ] = None
    report_only: Annotated[
        bool, option("Make the report anew from what is in --out.", "--report-only")
    ] = False

    @property
    def policy_names(self) -> str:
        """`policies`, or the default."""
        if self.policies is not None:
            return self.policies
        return "" if self.as_served or self.grid is not None else "look_ahead,streaming"

    @property
    def task_names(self) -> list[str]:
        """`tasks` as a list, or the default."""
        return names_in("perplexity,niah_single" if self.tasks is None else self.tasks)

    @property
    def contexts(self) -> tuple[int, ...]:
        """`context_tokens` as numbers.

        Raises `SettingsError` if one is no length of a context, or there is none.
        """
        given = f"context_tokens={self.context_tokens}"
        found = tuple(read_context(text, given) for text in names_in(self.context_tokens))
        if not found or len(set(found)) < len(found):
            raise SettingsError(f"{given}: one or several, each once; e.g. 4096, or 8k,16k,32k")
        return found

    @property
    def folder(self) -> Path:
        """Where results go."""
        return self.out.expanduser()

    @property
    def part_of(self) -> tuple[int, int]:
        """Which part of the samples is asked, of how many; 1 of 1 is all.

        Raises `SettingsError` if `part` is not of the form I/N.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", (self.part or "1/1").strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise SettingsError(f"part={self.part}: I/N is required, with I from 1 to N, e.g. 1/8")
        return int(match[1]), int(match[2])

    @property
    def dense_argv(self) -> tuple[str, ...]:
        """`dense_args` as words.

        Raises `SettingsError` if a quotation does not end.
        """
        try:
            return tuple(shlex.split(self.dense_args))
        except ValueError as error:
            raise SettingsError(f"dense_args={self.dense_args}: {error}") from error


def read_context(text: str, given: str) -> int:
    """Return the tokens that `text` says, e.g. ``8k``, of what was `given`.

    Raises `SettingsError` if it is no number of tokens, or less than 256.
    """
    try:
        tokens = int(read_token_count(text))
    except ValueError as error:
        raise SettingsError(f"{given}: {error}") from error
    if tokens < LEAST_CONTEXT:
        raise SettingsError(f"{given}: a context has at least {LEAST_CONTEXT} tokens, e.g. 8k")
    return tokens


def names_in(text: str) -> list[str]:
    """Split a list that is separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]
