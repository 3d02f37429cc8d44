# SPDX-License-Identifier: Apache-2.0
"""``tandemkv plan``: what fits where and how fast it is likely to be. Starts nothing."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.console import Console

from tandemkv.server.options import RANK_FLAGS, with_flags
from tandemkv.server.placement_choice import index_on_gpu
from tandemkv.server.preflight import check_policy
from tandemkv.server.settings_sources import Sourced, load_settings

from .choose import choose_placement
from .footprint import GIB
from .shape import BUILT_IN_SHAPES, find_shape
from .view import plan_json, plan_view
from .workload import INDEX_DTYPES, Workload

_KEYS = (
    "policy", "budget_tokens", "resident_factor", "num_sink_tokens", "num_recent_tokens",
    "sample_tokens", "fetch_cap", "exact_layers", "anchors", "share_layers", "kascade_fraction",
)  # fmt: skip
PLAN_FLAGS = tuple(flag for flag in RANK_FLAGS if flag.key in {f"selection.{key}" for key in _KEYS})


@with_flags(PLAN_FLAGS)
def plan(
    flags: dict[str, Sourced],
    model: Annotated[
        str,
        typer.Option("--model", help=f"Model directory, or one of {', '.join(BUILT_IN_SHAPES)}."),
    ],
    gpus: Annotated[int, typer.Option("--gpus", min=1, max=64, help="GPUs of one host.")] = 1,
    gpu_memory: Annotated[
        float,
        typer.Option("--gpu-memory", min=1, max=4096, help="GiB of each GPU, as programs see it."),
    ] = 139.0,
    context: Annotated[
        int, typer.Option("--context", min=1, max=1 << 24, help="Tokens of one request.")
    ] = 65536,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=4096, help="Requests that decode together.")
    ] = 8,
    cache_tokens: Annotated[
        int | None,
        typer.Option("--cache-tokens", min=1, help="KV capacity; default context x concurrency."),
    ] = None,
    chunked_prefill_size: Annotated[
        int,
        typer.Option("--chunked-prefill-size", min=16, help="Prompt tokens per forward pass."),
    ] = 8192,
    index_dtype: Annotated[
        str | None,
        typer.Option(
            "--index-dtype",
            metavar="|".join(INDEX_DTYPES),
            help="Precision of scans; default what serve takes on GPUs, int4 for most policies.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="bfloat16|float16|float32", help="Weights and KV.")
    ] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what fits on which GPUs, the predicted time per token, and what to choose.

    Exit code 1 if no placement of tandemkv fits.
    """
    flags["model"] = Sourced(model, "--model")
    selection = load_settings(flags, os.environ).selection
    check_policy(selection.policy)
    load = Workload.from_selection(
        selection,
        context_tokens=context,
        concurrency=concurrency,
        chunk_tokens=chunked_prefill_size,
        capacity_tokens=cache_tokens,
        index_dtype=index_dtype or index_on_gpu(selection),
    )
    shape = find_shape(model, dtype=dtype)
    gpu_bytes = int(gpu_memory * GIB)
    choice = choose_placement(shape, load, num_gpus=gpus, gpu_bytes=gpu_bytes)
    if as_json:
        typer.echo(
            json.dumps(plan_json(choice, shape, load, num_gpus=gpus, gpu_bytes=gpu_bytes), indent=2)
        )
    else:
        console = Console(highlight=False)
        for part in plan_view(choice, shape, load, gpu_bytes):
            console.print(part)
    if choice.chosen is None:
        raise typer.Exit(1)
