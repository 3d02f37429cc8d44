# SPDX-License-Identifier: Apache-2.0
"""``tandemkv plan``: what fits where and how fast it is likely to be. Starts nothing."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.model_spec import (
    ModelSpec,
    read_config,
    read_model_spec,
    spec_of_config,
)
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.cache_rank.protocol.settings.token_count import read_token_count
from tandemkv.server.checks.context_limit import how_to_extend
from tandemkv.server.evaluation.request_options import option, takes
from tandemkv.server.models.calibrated import calibration_advice, with_calibration
from tandemkv.server.settings.flags import OPERATION, SERVE_FLAGS, SWITCH, with_flags
from tandemkv.server.settings.launch_settings import EMBEDDED_MODEL, ServeSettings
from tandemkv.server.settings.sources import Sourced, load_settings

from .choose import Choice, choose_placement, dense_lengths
from .constants import Constants, constants_here, measure_here
from .footprint import GIB
from .pages import check_chunk, on_device, page_tokens
from .placement import Placement, PlacementKind, possible_placements
from .shape import BUILT_IN_CONFIGS, ModelShape, find_shape, is_built_in
from .view import plan_json, plan_view, profile_view
from .workload import DEFAULT_CHUNK_TOKENS, Workload

_MOST_TOKENS, _H200_GIB = 1 << 30, 139
_TOO_LONG = (
    "{context} tokens are more than the {limit} of max_position_embeddings in the model's "
    "config.json, and serve refuses them: first {how}"
)
_REFRESHED = (
    "the predicted times are those of steps that select; with --refresh-every {steps} one of "
    "{steps} does, and the others are shorter"
)
_SHARED = (
    "planned for {count} requests of {tokens} tokens, which share --cache-tokens {capacity}: "
    "fewer of them may have up to {context} each"
)
_POOLED = (
    "the predicted times are without --pool-before and --pool-after, which made a layer's "
    "selection a third longer on an H200 (docs/policies.md)"
)
_BOUNDS = (
    "the policy reads bounds of pages, and memory and times are predicted for an index of keys "
    "(docs/policies.md)"
)
_KEYS = (
    "policy", "budget_tokens", "resident_factor", "index_dtype", "index_channels",
    "num_sink_tokens", "num_recent_tokens", "sample_tokens", "fetch_cap", "exact_layers",
    "anchors", "share_layers",
)  # fmt: skip
_DTYPE = "bfloat16"
NAMES = (EMBEDDED_MODEL, *BUILT_IN_CONFIGS)
_PLACED = ("cache_ranks", "tensor_parallel")
_PLANNED = {*_PLACED, "calibrated", "cache.kv_dtype", *(f"selection.{key}" for key in _KEYS)}
PLAN_FLAGS = tuple(flag for flag in SERVE_FLAGS if flag.key in _PLANNED)
_TEXTS = {
    "cache_ranks": "Plan one placement alone. 0: in SGLang's process; n: on n GPUs more, each with "
    "a part of the KV heads; n is a multiple of --tp. Default: all that --gpus allow, compared.",
    "tensor_parallel": "GPUs that the model is split over (tensor parallel). Default: 1 with "
    "--cache-ranks; without it all that --gpus allow, compared.",
    "selection.index_dtype": "Precision of scans. Default: what serve takes on GPUs, int4 for most "
    "policies.",
}
"""Of the help, where `serve` has others for the same option."""
_OWN_OPTIONS = {
    "cache.capacity_tokens": "--cache-tokens",
    "max_running_requests": "--concurrency",
    "max_context": "--context",
    "chunked_prefill_size": "--chunked-prefill-size",
    "dtype": "--dtype",
    "model": "--model",
}
"""Settings that `plan` has options of its own for, and reads nowhere else."""


def _token_count(text: str | int) -> int:
    try:
        count = int(read_token_count(str(text)))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not 0 < count <= _MOST_TOKENS:
        raise typer.BadParameter(f"{text}: give 1 to {_MOST_TOKENS >> 20}m tokens")
    return count


_TOKENS = {"parser": _token_count, "metavar": "TOKENS"}
_NUMBER = {"metavar": "INTEGER"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Options of ``tandemkv plan``; `flags` are those of ``serve`` that it takes as well."""

    flags: dict[str, Sourced]
    model: Annotated[str, option(f"Model directory, or one of {', '.join(NAMES)}.")]
    gpus: Annotated[int, option("GPUs of one host.", min=1, max=64, **_NUMBER)] = 1
    gpu_memory: Annotated[
        float | None,
        option(
            "Memory of each GPU, as programs see it. Default: that of the smallest GPU of this "
            "machine; where there is none 139, an H200's.",
            min=1,
            max=4096,
            metavar="GIB",
        ),
    ] = None
    context: Annotated[int, option("Length of one request, e.g. 64k.", **_TOKENS)] = 65536
    concurrency: Annotated[
        int, option("Requests that decode together.", min=1, max=4096, **_NUMBER)
    ] = 8
    cache_tokens: Annotated[
        int | None,
        option(
            "Tokens whose K/V are held. Default: context x concurrency. With fewer, "
            "shorter requests are planned, which share them equally.",
            **_TOKENS,
        ),
    ] = None
    chunked_prefill_size: Annotated[
        int,
        option(
            "Prompt tokens per forward pass.",
            min=16,
            rich_help_panel=OPERATION,
            hidden=True,
            **_NUMBER,
        ),
    ] = DEFAULT_CHUNK_TOKENS
    dtype: Annotated[
        str, option(r"Weights and K/V. \[bfloat16, float16 or float32]", metavar="CHOICE")
    ] = _DTYPE
    measure: Annotated[
        bool,
        option(
            "Time this machine's GPU first, in about 10 s, and keep its profile: from then on "
            "plan and serve predict with it.",
            "--measure",
            metavar=SWITCH,
        ),
    ] = False
    as_json: Annotated[bool, option("Print the plan as JSON.", "--json", metavar=SWITCH)] = False


class _Served(NamedTuple):
    """What would be served, and of which model; `notes` is what was said meanwhile."""

    settings: ServeSettings
    shape: ModelShape
    config: Mapping[str, Any]
    spec: ModelSpec
    notes: list[str]


@with_flags(PLAN_FLAGS, _TEXTS)
@takes(PlanRequest)
def plan(request: PlanRequest) -> None:
    """Say what fits on which GPUs, the predicted time per token, and what to choose.

    By default all placements that --gpus allow are compared.

    --cache-ranks asks about one alone, --tp about those with so many GPUs.

    Exit code 1 if no placement of tandemkv fits.
    """
    from .placement_checks import choosable
    from .placement_choice import model_gpus

    served, gpus = _served(request), request.gpus
    shape, selection = served.shape, served.settings.selection
    tp_size, num_cache_gpus = _asked_placement(served.settings, served.spec, gpus)
    load = _load(request, selection)
    memory = request.gpu_memory
    gpu_bytes = _bytes_here() if memory is None else int(memory * GIB)
    cost, note = _constants(request.measure)
    available, by_messages = None, served.settings.wished_link == "message"
    if num_cache_gpus is None:
        tp_size = model_gpus(served.settings, served.spec)
    placements = possible_placements(shape, gpus, tp_size, num_cache_gpus, by_messages=by_messages)
    if num_cache_gpus is None:
        _, *possible = placements
        if not selection.declared.is_captured:
            possible = [x for x in possible if x.kind is PlacementKind.IN_PROCESS]
        available = choosable(served.settings, served.spec, possible, served.notes.append)
    choice = choose_placement(
        placements, shape, load, gpu_bytes=gpu_bytes, available=available, cost=cost,
        is_asked=num_cache_gpus is not None,
    )  # fmt: skip
    if choice.chosen is not None:
        _check_bounds(request, load, selection)
    lengths = dense_lengths(selection, choice, shape, load)
    if request.as_json:
        found = plan_json(choice, shape, load, num_gpus=gpus, gpu_bytes=gpu_bytes)
        typer.echo(json.dumps(found | {"break_even": lengths.break_even or None}, indent=2))
    else:
        said = lengths.said, note
        lines = [Text(line) for line in _lines(request, served, choice, load, said)]
        console = Console(highlight=False)
        for part in plan_view(choice, shape, load, gpu_bytes):
            console.print(part)
        for line in lines:
            console.print(line, soft_wrap=True)
    if choice.chosen is None:
        raise typer.Exit(1)


def _load(request: PlanRequest, selection: SelectionSettings) -> Workload:
    """Return what is served: requests of `context` tokens, or what `cache_tokens` has for each."""
    capacity, context = request.cache_tokens, request.context
    share = context if capacity is None else max(1, capacity // request.concurrency)
    if capacity is not None and capacity < context:
        raise SettingsError(
            f"cache_tokens={capacity} cannot hold one request of {context} tokens; raise "
            "--cache-tokens or lower --context"
        )
    return Workload.from_selection(
        selection,
        context_tokens=min(context, share),
        concurrency=request.concurrency,
        chunk_tokens=request.chunked_prefill_size,
        capacity_tokens=capacity,
        max_context=context if share < context else None,
    )


def _check_bounds(request: PlanRequest, load: Workload, selection: SelectionSettings) -> None:
    """Refuse a load whose numbers `serve` would not take; what does not fit is told as such."""
    held = "--context and --concurrency" if request.cache_tokens is None else "--cache-tokens"
    numbers = {
        "max_context": Sourced(request.context, "--context"),
        "cache.capacity_tokens": Sourced(load.total_tokens, held),
        "chunked_prefill_size": Sourced(load.chunk_tokens, "--chunked-prefill-size"),
    }
    load_settings(request.flags | numbers, os.environ)
    page_size = page_tokens(selection.index_dtype, selection.num_recent_tokens)
    check_chunk(load.chunk_tokens, page_size)


def _served(request: PlanRequest) -> _Served:
    """Return what `serve` would make of the options, on GPUs."""
    from tandemkv.cache_rank.calibration.format import CalibrationError

    from .placement_choice import with_anchors_and_index

    settings, notes = _settings(request.flags, request.model), list[str]()
    shape, directory = _model(request.model, request.dtype)
    shape = shape.with_kv_dtype(settings.cache.kv_dtype)
    if directory is None:
        config = BUILT_IN_CONFIGS[shape.name]
        spec = spec_of_config(config, Path(shape.name), dtype="bfloat16")
    else:
        config = read_config(directory)
        spec = read_model_spec(directory, dtype="bfloat16")
        settings = with_calibration(settings, spec, notes.append)  # as `serve` takes it up
    with suppress(CalibrationError):  # that there is none is told with the plan
        settings = with_anchors_and_index(settings, spec, "cuda")
    return _Served(settings, shape, config, spec, notes)


def _lines(
    request: PlanRequest, served: _Served, choice: Choice, load: Workload, said: Iterable[str]
) -> Iterator[str]:
    """Yield what follows the tables: how to start it, `said`, and what to know of that."""
    from .placement_checks import contradiction

    if choice.chosen is not None:
        yield f"start it with\n  {_command(request, choice.chosen.placement, load)}"
    if load.context_tokens < request.context:
        yield _SHARED.format(
            count=load.concurrency,
            tokens=load.context_tokens,
            capacity=load.total_tokens,
            context=request.context,
        )
    yield from filter(None, (*said, *served.notes))
    advice = calibration_advice(served.settings, served.spec)
    if choice.chosen is not None and advice is not None:
        yield advice
    if choice.chosen is not None and not choice.is_asked:
        why = contradiction(served.settings, served.spec, choice.chosen.placement)
        if why:
            yield f"serve refuses it as it is: {why}"
    yield from _notes(served.settings.selection, served.spec)
    limit = served.shape.max_context
    if limit and request.context > limit:
        how = how_to_extend(served.config, request.context)
        yield _TOO_LONG.format(context=request.context, limit=limit, how=how)


def _notes(selection: SelectionSettings, spec: ModelSpec) -> Iterator[str]:
    """Yield what `serve` still lacks, and what the predicted times leave out."""
    from tandemkv.cache_rank.calibration.format import CalibrationError
    from tandemkv.cache_rank.calibration.resolve import resolve_calibration
    from tandemkv.cache_rank.policies.registry import find_policy

    try:
        resolve_calibration(selection, spec, find_policy(selection.policy).capabilities)
    except CalibrationError as error:
        yield f"serve refuses it as it is: {error}"
    if not selection.declared.is_captured:
        yield f"decode steps of policy {selection.policy} are not captured: they take longer"
    if find_policy(selection.policy).capabilities.index == "page_bounds":
        yield _BOUNDS
    if selection.pool_before or selection.pool_after:
        yield _POOLED
    if selection.refresh_steps > 1:
        yield _REFRESHED.format(steps=selection.refresh_steps)


def _bytes_here() -> int:
    """Return the memory of the smallest GPU of this machine, or of an H200 if there is none."""
    import torch

    from .devices import smallest_gpu

    count = torch.cuda.device_count()
    return smallest_gpu(count) if count else _H200_GIB * GIB


def _model(model: str, dtype: str) -> tuple[ModelShape, Path | None]:
    """Return the shape of a model, and its directory; None for one that is built in."""
    from tandemkv.server.checks.preflight import resolve_model

    if model == EMBEDDED_MODEL:
        model = str(resolve_model(model, lambda _: None))
    shape = find_shape(model, dtype=dtype, names=NAMES)
    return shape, None if is_built_in(model) else resolve_model(model, lambda _: None)


def _constants(measure: bool) -> Constants:
    """Return whose constants are predicted with; with `measure` this machine's, shown on stderr."""
    if not measure:
        return constants_here()
    console = Console(highlight=False, stderr=True)
    profile = measure_here(lambda line: console.print(Text(line), soft_wrap=True))
    console.print(profile_view(profile))
    return Constants(profile.constants(), "")


def _settings(flags: dict[str, Sourced], model: str) -> ServeSettings:
    """Return what would be served on a GPU with these settings."""
    from tandemkv.cache_rank.policies.composition import check_device
    from tandemkv.cache_rank.policies.registry import find_policy

    for key, own in _OWN_OPTIONS.items():
        if key in flags:
            raise SettingsError(f"{flags[key].source}: plan does not read it; use {own}")
    flags["model"] = Sourced(model, "--model")
    settings = load_settings(flags, os.environ)
    selection = settings.selection
    if settings.device == "cpu":
        raise SettingsError(
            "device=cpu: plan predicts what GPUs do; leave it out, or start `tandemkv serve` "
            "without a plan"
        )
    if selection.declared.attends:
        raise SettingsError(
            f"policy={selection.policy} attends on the host's CPU, and plan predicts what GPUs do; "
            "use another --policy, or start `tandemkv serve` without a plan"
        )
    check_device(find_policy(selection.policy), selection.policy, "cuda")
    # The longest request is --context, whatever a variable says.
    changes = {"selection": on_device(selection, "cuda"), "max_context": None}
    return settings.model_copy(update=changes)


def _command(request: PlanRequest, placement: Placement, load: Workload) -> str:
    """Return the command that serves `load` in `placement`; what was given is given again."""
    model = request.model
    words = ["tandemkv", "serve", "/path/to/model" if is_built_in(model) else model]
    words += [*placement.flags, "--max-running-requests", str(load.concurrency)]
    words += ["--cache-tokens", str(load.total_tokens)]
    words += ["--max-context", str(request.context)]
    if load.chunk_tokens != DEFAULT_CHUNK_TOKENS:
        words += ["--chunked-prefill-size", str(load.chunk_tokens)]
    if request.dtype != _DTYPE:
        words += ["--dtype", request.dtype]
    for key, (value, source) in request.flags.items():
        if key in ("model", *_PLACED):
            continue
        if source.startswith("--set "):
            words += ["--set", f"{source.removeprefix('--set ')}={value}"]
        else:
            words += _flag(source, value)
    return shlex.join(words)


def _flag(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [name if value else f"--no-{name.removeprefix('--')}"]
    return [name, str(value)]


def _asked_placement(
    settings: ServeSettings, spec: ModelSpec, num_gpus: int
) -> tuple[int | None, int | None]:
    """Return the GPUs of the model and of the cache; None for a number that is left open.

    Both mean what they mean to `serve`: with `cache_ranks` alone the model is on one GPU, and a
    link that is given leads to as many cache ranks as it does there. Raises
    `SettingsError` or `PolicyError`, with what to do, if `serve` would refuse `settings`, or there
    are fewer than these GPUs.
    """
    from tandemkv.cache_rank.calibration.format import CalibrationError
    from tandemkv.cache_rank.policies.registry import check_pooling, check_read, find_policy
    from tandemkv.server.checks.preflight import check_channels, check_heads, check_model

    from .placement_checks import check_contradictions

    if settings.nnodes > 1:
        count = settings.cache_ranks or 0
        raise SettingsError(
            f"nnodes={settings.nnodes}: plan knows no network between hosts; leave it out. With "
            f"--gpus {settings.tensor_parallel + count} --tp {settings.tensor_parallel} "
            f"--cache-ranks {count} the memory of each GPU is the same, and the times are those of "
            "one host"
        )
    check_model(settings, spec, {})
    policy = find_policy(settings.selection.policy)
    policy.check_settings(settings.selection)
    check_read(policy, settings.selection)
    check_pooling(policy, settings.selection)
    check_channels(settings.selection, spec)
    with suppress(CalibrationError):  # that there is none is told with the plan
        check_heads(settings, spec)
    tp_size, cache_ranks = settings.tensor_parallel, settings.cache_ranks
    if settings.wished_link is not None:
        cache_ranks = settings.placement_on("cuda").num_cache_ranks
    if cache_ranks is None and "tensor_parallel" not in settings.model_fields_set:
        return None, None
    if spec.num_kv_heads % tp_size:
        raise SettingsError(
            f"tensor_parallel={tp_size}: several GPUs would have the same one of "
            f"{spec.num_kv_heads} KV heads, for which plan has no figures; use --tp "
            f"{spec.num_kv_heads} at most"
        )
    if cache_ranks is not None:
        check_contradictions(settings, spec, settings.placement_on("cuda"))
    # Cache ranks at an address have GPUs of their own hosts.
    num_needed = tp_size if settings.cache_rank_addresses else tp_size + (cache_ranks or 0)
    if num_needed > num_gpus:
        counts = {"--tp": tp_size if tp_size > 1 else 0, "--cache-ranks": cache_ranks or 0}
        lower = " or ".join(name for name, count in counts.items() if count)
        raise SettingsError(
            f"tensor_parallel={tp_size} and cache_ranks={cache_ranks or 0} take {num_needed} GPUs, "
            f"and gpus={num_gpus}; use --gpus {num_needed}, or a lower {lower}"
        )
    return tp_size, cache_ranks
