# SPDX-License-Identifier: Apache-2.0
"""What is checked before anything is started. Every refusal says what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandemkv.cache_rank.policies.composition import check_kv_dtype
from tandemkv.cache_rank.policies.registry import find_policy
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.memory.available_memory import available_bytes
from tandemkv.cache_rank.protocol.models.fitted_queries import FittedQueries
from tandemkv.cache_rank.protocol.models.index_channels import check_index_channels
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec, read_config, read_model_spec
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.inference_rank.edge.keys import Keys
from tandemkv.server.launch.nodes import check_meeting_place
from tandemkv.server.models.calibrated import calibration_advice
from tandemkv.server.plan.devices import resolve_device
from tandemkv.server.plan.memory import estimate_memory, gib
from tandemkv.server.plan.placement_checks import check_runs_on
from tandemkv.server.plan.placement_choice import resolve_alone, resolve_placement
from tandemkv.server.settings.launch_settings import EMBEDDED_MODEL, ServeSettings
from tandemkv.server.settings.sglang_args import check_sglang_args, check_sglang_environment

from .context_limit import how_to_extend
from .model_files import check_model_files, check_query_weights, check_weights_path
from .ports import choose_port
from .sglang_features import check_adapters, check_speculation, check_watermark
from .shared_gpus import check_shared_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedLaunch:
    """Settings with every ``auto`` decided; `device` is the inference rank's."""

    settings: ServeSettings
    model_dir: Path
    spec: ModelSpec
    device: str
    port: int

    @property
    def placement(self) -> Placement:
        """Where the cache rank works, and why."""
        return self.settings.rank_settings.placement


def resolve_launch(settings: ServeSettings, progress: Callable[[str], None]) -> ResolvedLaunch:
    """Check everything that can be checked without starting a process.

    `progress` is told what takes a while. Raises `SettingsError` if the settings do not fit this
    machine, the model or this version, `UnsupportedModelError` if the model cannot be served or its
    queries cannot be predicted, `ModelFilesError` if a file of it is missing, damaged, or does not
    fit the others.
    """
    device = resolve_device(settings.device)
    check_runs_on(settings, device)
    check_sglang_args(settings.sglang_args, device=device)
    check_sglang_environment(os.environ)
    check_adapters(settings.sglang_args)
    Keys.read(settings.edge)  # SGLang's process would fail at them half a minute later
    port = choose_port(settings.host, settings.port)
    check_meeting_place(settings)
    model_dir = resolve_model(settings.model, progress)
    dtype = resolve_dtype(settings.dtype, device, model_dir)
    spec = read_model_spec(model_dir, dtype=dtype, max_context=settings.max_context)
    check_kv_dtype(find_policy(settings.selection.policy), settings.selection.policy, dtype)
    config = read_config(model_dir)
    check_model(settings, spec, config)
    check_model_files(model_dir, config, settings.sglang_args)
    check_query_weights(settings, model_dir, config)
    FittedQueries.of(settings.selection, spec)  # refuses those of another model
    settings = resolve_placement(settings, spec, model_dir, device=device, progress=progress)
    advice = calibration_advice(settings, spec) if device == "cuda" else None
    if advice is not None:
        progress(advice)
    check_shared_gpus(settings.rank_settings.placement)
    check_speculation(settings, spec)
    check_watermark(settings)
    check_selection(settings, spec)
    check_memory(settings, spec, model_dir, device=device)
    return ResolvedLaunch(
        settings=settings, model_dir=model_dir, spec=spec, device=device, port=port
    )


def resolve_cache_rank(
    settings: ServeSettings, device: str, progress: Callable[[str], None]
) -> tuple[ServeSettings, Path]:
    """Return the settings, and the model, of a cache rank on `device` that is started by itself.

    Nothing that both ranks compare is left open: see `resolve_alone`. Raises `SettingsError` or
    `UnsupportedModelError` if the model cannot be used.
    """
    model_dir = resolve_model(settings.model, progress)
    dtype = resolve_dtype(settings.dtype, device, model_dir)
    spec = read_model_spec(model_dir, dtype=dtype, max_context=settings.max_context)
    check_kv_dtype(find_policy(settings.selection.policy), settings.selection.policy, dtype)
    check_capacity(settings)
    check_index_channels(settings.selection, spec)
    return resolve_alone(settings, spec, model_dir, device=device), model_dir


def resolve_model(model: str, progress: Callable[[str], None]) -> Path:
    """Return the directory of `model`; the embedded one is unpacked on first use.

    Raises `SettingsError` if there is no such directory, or SGLang cannot read weights from it.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        found = path.resolve()
        check_weights_path(found, f"model={model}")
        return found
    if model == EMBEDDED_MODEL:
        from tandemkv.server.models.embedded_model import embedded_model_dir

        found = embedded_model_dir(progress)
        check_weights_path(found, f"model={model}")
        return found
    raise SettingsError(
        f"model={model}: no such directory; give a directory in Hugging Face layout (nothing is "
        f"downloaded), or {EMBEDDED_MODEL}"
    )


def resolve_dtype(dtype: str, device: str, model_dir: Path) -> str:
    """Decide ``auto``: float32 on cpu, what the model was saved in on cuda."""
    if dtype != "auto":
        return dtype
    if device == "cpu":
        return "float32"
    config = read_config(model_dir)
    saved = str(config.get("dtype") or config.get("torch_dtype"))
    return saved if saved in ("bfloat16", "float16") else "bfloat16"


def check_selection(settings: ServeSettings, spec: ModelSpec) -> None:
    """Refuse a policy whose calibration or pooling does not fit, and settings it never reads.

    Raises `SettingsError`, saying what would do.
    """
    from tandemkv.cache_rank.policies.registry import check_pooling, check_read

    selection = settings.selection
    policy = find_policy(selection.policy)
    policy.check_settings(selection)
    check_read(policy, selection)
    check_pooling(policy, selection)
    check_channels(selection, spec)
    check_heads(settings, spec)


def check_heads(settings: ServeSettings, spec: ModelSpec) -> None:
    """Refuse KV heads that follow those of another GPU or cache rank.

    Raises `CalibrationError` if none fits that says which they follow, `SettingsError` with what
    would do.
    """
    from tandemkv.cache_rank.calibration.resolve import resolve_calibration

    selection = settings.selection
    found = resolve_calibration(selection, spec, find_policy(selection.policy).capabilities)
    if found.clusters is not None and settings.tensor_parallel > 1:
        raise SettingsError(
            f"tensor_parallel={settings.tensor_parallel}: policy={selection.policy} selects once "
            "for KV heads that lie on several ranks; use --tp 1, or another --policy"
        )
    is_sharded = settings.head_shards > 1
    if found.share is None or selection.anchors:
        return
    if is_sharded or settings.tensor_parallel > 1:
        anchors = ",".join(str(layer) for layer in sorted(set(found.share.sources)))
        place, flag = ("cache rank", "--cache-ranks") if is_sharded else ("GPU", "--tp")
        raise SettingsError(
            f"tensor_parallel={settings.tensor_parallel}, cache_ranks={settings.cache_ranks}: head "
            f"maps of {found.origin} lead from one {place} to another; use --anchors {anchors}, "
            f"with which every head follows its own, or {flag} 1"
        )


def check_channels(selection: SelectionSettings, spec: ModelSpec) -> None:
    """Refuse a file of channels that nothing would read, or that is of another model."""
    if selection.index_channels is None:
        return
    says = find_policy(selection.policy).capabilities
    if not says.selects or says.attends or says.index != "keys":
        raise SettingsError(
            f"index_channels: policy={selection.policy} scans no index of keys; drop "
            "--index-channels, or take another --policy"
        )
    if selection.index_dtype == "native":
        raise SettingsError(
            "index_channels: index_dtype=native scans keys where they lie, with all channels; use "
            "--index-dtype int8, or int4 on GPUs"
        )
    check_index_channels(selection, spec)


def check_model(settings: ServeSettings, spec: ModelSpec, config: dict[str, object]) -> None:
    """Refuse settings that the model contradicts.

    Raises `SettingsError` if a layer does not exist, or the context is longer than the model's, or
    than what the cache holds.
    """
    beyond = [layer for layer in settings.selection.exact_layer_ids if layer >= spec.num_layers]
    if beyond:
        raise SettingsError(
            f"selection.exact_layers={beyond} do not exist: {settings.model} has layers 0 to "
            f"{spec.num_layers - 1}; correct --exact-layers"
        )
    tp_size = settings.tensor_parallel
    if spec.num_qo_heads % tp_size or max(spec.num_kv_heads, tp_size) % min(
        spec.num_kv_heads, tp_size
    ):
        raise SettingsError(
            f"tensor_parallel={tp_size} does not divide the {spec.num_qo_heads} query and "
            f"{spec.num_kv_heads} KV heads of {settings.model}; use another --tp"
        )
    limit = config.get("max_position_embeddings")
    if settings.max_context is not None and isinstance(limit, int) and settings.max_context > limit:
        raise SettingsError(
            f"max_context={settings.max_context} is longer than the {limit} tokens that "
            f"{settings.model} was trained for (max_position_embeddings in its config.json); lower "
            f"--max-context, or {how_to_extend(config, settings.max_context)}"
        )
    check_capacity(settings)  # a larger cache would not help beyond the model's limit


def check_capacity(settings: ServeSettings) -> None:
    """Refuse a cache that cannot hold the longest request that is taken, with `SettingsError`."""
    capacity, longest = settings.cache.capacity_tokens, settings.max_context
    if longest is not None and capacity < longest:
        raise SettingsError(
            f"cache.capacity_tokens={capacity} cannot hold one request of max_context={longest}; "
            "raise --cache-tokens or lower --max-context"
        )


def check_memory(settings: ServeSettings, spec: ModelSpec, model_dir: Path, *, device: str) -> None:
    """Refuse a capacity that this machine's memory cannot hold; see `estimate_memory`.

    Raises `SettingsError`, with the numbers, and the capacity that would fit.
    """
    needed = estimate_memory(settings, spec, model_dir, device=device)
    available = available_bytes()
    if available is None or needed.total <= available:
        return
    rest = available - (needed.total - needed.kv)
    fitting = max(0, rest * settings.cache.capacity_tokens // max(1, needed.kv))
    advice = (
        f"--cache-tokens {fitting // 256 * 256} would fit"
        if fitting >= 256
        else "use a smaller model or a machine with more memory"
    )
    raise SettingsError(
        f"cache.capacity_tokens={settings.cache.capacity_tokens} does not fit: needed "
        f"{gib(needed.total)} ({needed.describe()}), available {gib(available)}; {advice}"
    )
