# SPDX-License-Identifier: Apache-2.0
"""Decide where the cache rank goes, if the user leaves it open."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tandemkv.cache_rank.calibration.format import CalibrationError
from tandemkv.cache_rank.policies.registry import find_policy
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.memory.one_device import ONE_DEVICE_VARIABLE, is_on_one_device
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.server.checks.shared_gpus import are_peers
from tandemkv.server.models.calibrated import with_calibration
from tandemkv.server.settings.launch_settings import ServeSettings

from .choose import break_even_batch_tokens, break_even_tokens, check_fits, choose_placement
from .constants import Constants, constants_here
from .cost import H200
from .devices import placed_alone, smallest_gpu
from .pages import on_device
from .placement import Placement as GpuPlacement
from .placement import PlacementKind, possible_placements
from .placement_checks import check_contradictions, check_runs_on, check_without_gpus, choosable
from .shape import ModelShape, shape_of_model
from .states import with_states
from .workload import DEFAULT_CHUNK_TOKENS, Workload

_OF_ALL_NODES = (
    "all nodes decide the same, so no profile of a machine is used; what the network adds to each "
    "step is not predicted, and is the same with and without selection"
)

if TYPE_CHECKING:
    from tandemkv.cache_rank.policies.base import LayerShare


def resolve_placement(
    settings: ServeSettings,
    spec: ModelSpec,
    model_dir: Path,
    *,
    device: str,
    progress: Callable[[str], None],
) -> ServeSettings:
    """Decide the placement and what follows from it, with the reason told to `progress`.

    Every setting that was left open is decided then: `tandemkv serve` starts with the result, and
    `tandemkv quality` names it. `placement`: the one value that says where the cache rank works,
    and why. `cache_ranks`, `transport` and `tensor_parallel`: on a CPU, and of a policy that
    attends, one cache rank process; on GPUs what `tandemkv plan` predicts to be fastest for
    `max_running_requests` requests that share the cache. `dense_tokens`, `dense_batch_tokens`,
    in-process on a GPU: the context of each request, and the tokens of a whole step, from which
    selecting is predicted to pay; on a CPU as many tokens as a step with samples attends to.
    Predictions have the constants of this machine's profile, or those of one H200
    (`constants_here`). `anchors`: those of a calibration that maps every head to itself, which
    tensor-parallel ranks can use as well. `index_dtype`: int4 where a GPU scans pages, a quarter of
    the bytes of bf16 keys; what is attended to is never quantised. `num_recent_tokens`: with it as
    many as a page has. `index_channels`, and the policy's ``predictor``: what was calibrated for
    this model (`with_calibration`). `late_layers`: 1 where another GPU selects, for nothing hides a
    first selection there. `sglang_args`: how many recurrent states SGLang keeps, of a model with
    linear attention. Raises `SettingsError` if nothing fits these GPUs, with the numbers.
    """
    check_runs_on(settings, device)
    settings = with_anchors_and_index(settings, spec, device)
    if device == "cpu":
        check_without_gpus(settings)
    settings = with_calibration(settings, spec, progress)
    later: list[str] = []
    settings, reason = _choose(settings, spec, model_dir, device=device, progress=later.append)
    placement = settings.placement_on(device, reason)
    settings = settings.model_copy(
        update={"placement": placement, "cache_ranks": placement.num_cache_ranks}
    )
    progress(f"placement: {placement.describe()}")
    if placement.has_far_pool and is_on_one_device():
        played = "the model's own device stands for the second GPU"
        if placement.host_engine and device == "cpu":
            played = "the CPU stands for the model's GPU"
        if not placement.host_engine or device == "cpu":
            progress(f"{ONE_DEVICE_VARIABLE}: {played}; that is for tests, and slow")
    check_contradictions(settings, spec, placement)
    given, settings = settings, with_late_layers(settings, spec.num_layers)
    if settings is not given:
        progress(
            "layer 0 uses tokens selected at the end of the step before, because its own selection "
            "would delay the step; --late-layers 0 turns that off"
        )
    settings = with_states(settings, spec, device)
    if device == "cuda":
        _check_gpus(settings, spec, model_dir, placement)
    found = _with_dense_tokens(settings, spec, model_dir, progress, device=device)
    if device == "cuda" and (found is not settings or later):
        later.insert(0, _planned_for(found, spec))
    for line in later:
        progress(line)
    return found


def _planned_for(settings: ServeSettings, spec: ModelSpec) -> str:
    load = _load(settings, spec)
    return (
        f"planned for {load.concurrency} requests of {load.context_tokens} tokens (--cache-tokens "
        f"{load.total_tokens} / --max-running-requests {load.concurrency}): give both as you will "
        "serve"
    )


def resolve_alone(
    settings: ServeSettings, spec: ModelSpec, model_dir: Path, *, device: str
) -> ServeSettings:
    """Decide for a cache rank what `resolve_placement` decides for its inference rank.

    `serve` hands decided settings to its cache rank. One that was started by itself reads what the
    user wrote, and the handshake refuses ranks of which one has filled in more than the other.
    `device` is the cache rank's; all else is as for `resolve_placement`.
    """
    if settings.placement is not None:
        return settings
    settings = placed_alone(with_anchors_and_index(settings, spec, device), device)
    settings = with_late_layers(settings, spec.num_layers)
    return _with_dense_tokens(settings, spec, model_dir, lambda _: None, device=device)


def model_gpus(settings: ServeSettings, spec: ModelSpec) -> int | None:
    """Return how many GPUs have the model; None leaves that to what is predicted.

    Unless it is given it is one where a head follows one that another GPU could have, and of a
    policy whose steps are not captured.
    """
    if "tensor_parallel" in settings.model_fields_set:
        return settings.tensor_parallel
    crosses = False
    with suppress(CalibrationError):  # there is none, which is refused elsewhere
        crosses = _crosses_heads(find_share(settings.selection, spec))
    return 1 if crosses or not settings.selection.declared.is_captured else None


def find_share(selection: SelectionSettings, spec: ModelSpec) -> LayerShare | None:
    """Return which layers share selections, and how; None if none do.

    Raises `CalibrationError` if that takes a calibration, and there is none that fits.
    """
    from tandemkv.cache_rank.calibration.resolve import resolve_calibration

    capabilities = find_policy(selection.policy).capabilities
    if capabilities.calibration != "kascade" and not selection.share_layers:
        return None
    return resolve_calibration(selection, spec, capabilities).share


def _crosses_heads(share: LayerShare | None) -> bool:
    return share is not None and any(m != tuple(range(len(m))) for m in share.head_maps)


def _with(settings: ServeSettings, **changes: object) -> ServeSettings:
    """Return the settings with `changes` of their selection."""
    changed = settings.selection.model_copy(update=changes)
    return settings.model_copy(update={"selection": changed})


def with_anchors_and_index(settings: ServeSettings, spec: ModelSpec, device: str) -> ServeSettings:
    """Fill in `anchors`, where every head follows its own, and the index of `device`."""
    share = find_share(settings.selection, spec)
    if share is not None and not settings.selection.anchors and not _crosses_heads(share):
        settings = _with(settings, anchors=tuple(sorted(set(share.sources))))
    return settings.model_copy(update={"selection": on_device(settings.selection, device)})


def with_late_layers(settings: ServeSettings, num_layers: int | None = None) -> ServeSettings:
    """Fill in `late_layers`, where it is left open and another GPU selects.

    One late layer is for what was measured there (docs/decisions/0020-late-layers-and-chains.md):
    a CPU that is met by messages has none by default. A model of too few layers has none; without
    `num_layers` it is one that has enough.
    """
    selection, placement = settings.selection, settings.rank_settings.placement
    is_far_cpu = placement.has_far_host and placement.model_device == "cpu"
    if (
        not placement.has_far_pool
        or is_far_cpu
        or selection.late_between_gpus == selection.num_late
    ):
        return settings
    if num_layers is not None and selection.late_between_gpus > selection.most_late(num_layers):
        return settings
    return _with(settings, late_layers=selection.late_between_gpus)


def _check_gpus(
    settings: ServeSettings, spec: ModelSpec, model_dir: Path, placement: Placement
) -> None:
    """Refuse what these GPUs cannot hold, before SGLang loads the weights."""
    tp_size, is_far = placement.tp_size, placement.has_far_pool
    if placement.host_engine:  # K/V are host memory: `check_memory`
        return
    # By messages the model's GPU has all K/V as well, whatever the other one has.
    has_cache_gpus = is_far and not is_on_one_device() and not placement.has_far_host
    is_far_here = placement.has_far_host and settings.cache_rank_address is None
    num_cache_gpus = placement.num_shards if has_cache_gpus else 0
    num_needed = tp_size + (placement.num_shards if is_far_here else num_cache_gpus)
    num_needed //= placement.num_nodes
    num_gpus = torch.cuda.device_count()
    if num_gpus < num_needed:
        nodes = f" on each of {placement.num_nodes} nodes" if placement.num_nodes > 1 else ""
        instead = "lower --tp, or use "
        if is_far:
            instead = (
                "lower --tp or --cache-ranks, or use --cache-ranks 0, which keeps the cache rank "
                "inside the inference rank's process, or "
            )
        raise SettingsError(
            f"tensor_parallel={tp_size} and cache_ranks={placement.num_cache_ranks} with "
            f"transport={placement.link} needs {num_needed} GPUs{nodes}, {num_gpus} seen "
            f"(CUDA_VISIBLE_DEVICES counts); {instead}--device cpu"
        )
    planned = GpuPlacement(
        kind=PlacementKind.SEPARATE if has_cache_gpus else PlacementKind.IN_PROCESS,
        tp_size=tp_size,
        num_cache_gpus=num_cache_gpus,
    )
    shape = _shape(settings, spec, model_dir)
    check_fits(planned, shape, _load(settings, spec), gpu_bytes=smallest_gpu(num_gpus))


def _shape(settings: ServeSettings, spec: ModelSpec, model_dir: Path) -> ModelShape:
    shape = shape_of_model(model_dir, name=settings.model, dtype=spec.dtype)
    return shape.with_kv_dtype(settings.cache.kv_dtype)


def _load(settings: ServeSettings, spec: ModelSpec) -> Workload:
    concurrency, capacity = settings.max_running_requests, settings.cache.capacity_tokens
    share = find_share(settings.selection, spec)
    return Workload.from_selection(
        settings.selection,
        anchors=None if share is None else tuple(sorted(set(share.sources))),
        context_tokens=min(spec.max_context, max(1, capacity // concurrency)),
        concurrency=concurrency,
        capacity_tokens=capacity,
        max_context=spec.max_context,
        chunk_tokens=settings.chunked_prefill_size or DEFAULT_CHUNK_TOKENS,
    )


def _with_dense_tokens(
    settings: ServeSettings, spec: ModelSpec, model_dir: Path, progress: Callable[[str], None],
    *, device: str,
) -> ServeSettings:  # fmt: skip
    selection = settings.selection
    is_open = selection.dense_tokens is None and selection.dense_while_fits
    if not is_open or settings.rank_settings.placement.has_far_pool:
        return settings
    if device == "cpu":  # a step with samples attends to as many tokens anyway
        return (
            _with(settings, dense_tokens=selection.row_tokens)
            if selection.num_samples
            else settings
        )
    if selection.declared.keeps_sink_only:  # which attend to so much at any length
        return settings
    shape = _shape(settings, spec, model_dir)
    load, tp_size = _load(settings, spec), settings.tensor_parallel
    cost, note = constants_here() if settings.nnodes == 1 else Constants(H200, _OF_ALL_NODES)
    tokens = break_even_tokens(shape, load, tp_size, cost)
    changes: dict[str, object] = {"dense_tokens": tokens}
    said = f"requests of up to {tokens} tokens attend to everything"
    if selection.dense_batch_tokens is None:
        together = break_even_batch_tokens(shape, load, tp_size, cost)
        changes["dense_batch_tokens"] = together
        said += f", and so do all of a step that has no more than {together} in all"
    progress(f"{said}: selecting pays beyond, by constants of {cost.origin}")
    if note:
        progress(f"predicted times: {note}")
    return _with(settings, **changes)


def _choose(
    settings: ServeSettings,
    spec: ModelSpec,
    model_dir: Path,
    *,
    device: str,
    progress: Callable[[str], None],
) -> tuple[ServeSettings, str]:
    """Decide what is open of `cache_ranks`, `transport` and `tensor_parallel`, and say why."""
    if settings.cache_ranks == 0:
        return settings, "--cache-ranks 0 was given"
    for name in ("cache_rank_address", "transport", "cache_ranks"):
        given = getattr(settings, name)
        if given is not None:
            here = ", for cache ranks on this host" if given == "message" else ""
            return settings, f"--{name.replace('_', '-')} {given} was given{here}"
    if device == "cpu" and spec.linear_layers:
        reason = "states of linear attention cannot be taken back if a cache rank is lost"
        return settings.model_copy(update={"cache_ranks": 0}), reason
    if device == "cpu":
        return settings, "the default on a CPU"
    if settings.selection.declared.attends:
        reason = f"policy {settings.selection.policy} attends on the host's CPU"
        return settings.model_copy(update={"cache_ranks": 1, "transport": "shared"}), reason
    if settings.tensor_parallel > 1:
        reason = f"--tp {settings.tensor_parallel} splits the cache as well"
    elif not settings.selection.declared.is_captured:
        reason = f"decode steps of policy {settings.selection.policy} are not captured"
    else:
        return _predicted_fastest(settings, spec, model_dir, progress)
    return settings.model_copy(update={"cache_ranks": 0}), reason


def _predicted_fastest(
    settings: ServeSettings, spec: ModelSpec, model_dir: Path, progress: Callable[[str], None]
) -> tuple[ServeSettings, str]:
    """Take what `tandemkv plan` predicts to be fastest on these GPUs."""
    num_gpus = torch.cuda.device_count()
    shape = _shape(settings, spec, model_dir)
    placements = possible_placements(shape, num_gpus, model_gpus(settings, spec))
    possible = [x for x in placements if x.is_chosen]
    if num_gpus > 1 and not are_peers(0, 1):
        possible = [x for x in possible if not x.num_cache_gpus]
    choice = choose_placement(
        placements,
        shape,
        _load(settings, spec),
        gpu_bytes=smallest_gpu(num_gpus),
        available=choosable(settings, spec, possible, progress),
        cost=constants_here().cost,
    )
    if choice.chosen is None:
        raise SettingsError(f"{choice.reason}; `tandemkv plan` shows every placement")
    chosen = choice.chosen.placement
    if not choice.gains:
        progress(
            "warning: tandemkv gains nothing at that load: stock SGLang is predicted to be no "
            "slower"
        )
    update: dict[str, object] = {"tensor_parallel": chosen.tp_size}
    update["cache_ranks"] = chosen.num_cache_gpus
    if chosen.num_cache_gpus:
        update["transport"] = "shared"
    return settings.model_copy(update=update), f"{chosen.name}: {choice.reason}"
