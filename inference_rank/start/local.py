# SPDX-License-Identifier: Apache-2.0
"""Build the attention backend, and the engine that this process drives if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from tandemkv.cache_rank.protocol.engine import (
    DenseLengths,
    Engine,
    EnginePools,
    check_dense,
    create_engine,
)
from tandemkv.cache_rank.protocol.errors import ContractError, SettingsError
from tandemkv.cache_rank.protocol.head_shard import HeadShard
from tandemkv.cache_rank.protocol.memory.mapped_tensors import MappedTensors
from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.cache_rank.protocol.models.fitted_queries import FittedQueries
from tandemkv.cache_rank.protocol.models.model_spec import FP8_KV, ModelSpec, heads_before
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    RankSettings,
    SelectionSettings,
)
from tandemkv.inference_rank import runtime as runtime_module
from tandemkv.inference_rank.attention.backend import ResidentBackend
from tandemkv.inference_rank.attention.dense_steps import DenseSteps
from tandemkv.inference_rank.attention.native import NativeAttention
from tandemkv.inference_rank.attention.prefix_staging import PrefixStaging
from tandemkv.inference_rank.attention.probe import AttentionProbe
from tandemkv.inference_rank.attention.resident_attention import AttendTable, RingTable
from tandemkv.inference_rank.attention.resident_home import OwnSet, ResidentHome
from tandemkv.inference_rank.attention.samples import StepSamples, zeros_on
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.links.base import Link
from tandemkv.inference_rank.links.local import LocalLink
from tandemkv.inference_rank.links.pool import rank_model_spec, with_index
from tandemkv.inference_rank.links.query_predictor import LiveQueryPredictor
from tandemkv.inference_rank.links.query_projection import QueryPlace
from tandemkv.inference_rank.refresh import RefreshSchedule, schedule_for
from tandemkv.inference_rank.sglang import versions as sglang_versions
from tandemkv.inference_rank.sglang.live_model import (
    architecture_of,
    attention_of,
    check_live_attention,
    layers_of,
)
from tandemkv.inference_rank.sglang.pool import Occupancy, layers_of_pool, token_slots
from tandemkv.inference_rank.weights.query_checkpoint import checkpoint_of

from .measurement import StartMeasurement, agree_over_ranks


@dataclass(slots=True, kw_only=True)
class LocalRuntime(runtime_module.Runtime):
    """What the plugin's hooks find in a process that has its own engine.

    `client` is None: there is no connection that could be lost.
    """

    rank: Engine
    measurement: StartMeasurement
    client: None = None

    def status(self) -> StatusReply:
        """Answer a `StatusRequest`."""
        plan = self.measurement.plan
        own = {
            "cache_rank_up": 1.0,
            "index_bytes": float(self.rank.nbytes),
            **self.rank.last_counters(),
            **plan.values(),
        }
        told = {"lost_reason": "", **plan.info()}
        return self.reply(epoch=1, ready=True, values=own, info=told)


def create_backend(runner: Any) -> ResidentBackend:
    """Create the backend, and this process's cache rank if it has one.

    Raises `SettingsError`, `UnsupportedModelError`, `PolicyError` or `ContractError`: the server
    must not start.
    """
    settings = runtime_module.settings_from_environment()
    check_sizes(runner, settings)
    check_kv_dtype(runner, settings)
    if settings.placement.maps_memory:
        from .shared import create_shared_backend

        return create_shared_backend(runner, settings)
    return _create_local_backend(runner, settings)


def _create_local_backend(runner: Any, settings: RankSettings) -> ResidentBackend:
    device = with_index(torch.device(runner.device))
    model = local_model_spec(runner)
    home = make_home(runner, settings, model, device)
    max_batch = len(home.table.slots)
    predictor = live_predictor(runner, settings, model, device=device)
    rank = create_engine(
        model=model,
        settings=settings,
        pools=_engine_pools(runner, home),
        max_batch=max_batch,
        predict_query=predictor,
        model_dir=Path(runner.model_config.model_path),
    )
    if rank.program.needs_hidden:
        predictor.load()
    measurement = StartMeasurement(settings, model, rank, device=device, agree=agree_over_ranks)
    num_slots = token_slots(runner.token_to_kv_pool)
    measurement.measure(runner, predictor, num_slots=num_slots, max_batch=max_batch)
    runtime = LocalRuntime(
        settings=settings,
        model=model,
        rank=rank,
        counters=Counters(),
        resident_bytes=home.nbytes,
        occupancy=Occupancy(runner),
        measurement=measurement,
        refresh=refresh_for(runner, settings.selection),
    )
    runtime_module.set_current(runtime)
    link = LocalLink(runner, rank, model, max_batch=max_batch, device=device)
    return backend_of(runner, runtime, link, home, cache_device=device, is_far=False)


def live_predictor(
    runner: Any, settings: RankSettings, model: ModelSpec, *, device: torch.device
) -> LiveQueryPredictor:
    """Return what predicts queries on `device`, by the model's own weights, not loaded yet.

    Or by a file of fitted ones; raises `SettingsError` if that does not fit.
    """
    num_ranks = sglang_versions.tensor_size()
    whole = structs.replace(model, num_qo_heads=num_ranks * model.num_qo_heads)
    dtype = settings.selection.predictor_dtype_of(on_second_gpu=settings.placement.has_far_pool)
    return LiveQueryPredictor(
        runner.model,
        QueryPlace(
            num_heads=model.num_qo_heads,
            head_dim=model.head_dim,
            device=device,
            is_int8=dtype == "int8",
            dtype=runner.dtype,
            checkpoint=checkpoint_of(runner),
            fitted=FittedQueries.of(settings.selection, whole),
        ),
        skipped=model.other_layers,
    )


def backend_of(
    runner: Any,
    runtime: runtime_module.Runtime,
    link: Link,
    home: ResidentHome,
    *,
    cache_device: torch.device,
    is_far: bool,
) -> ResidentBackend:
    """Return the backend that attends to `home`, which `link` keeps fresh."""
    settings = runtime.settings
    selection, full = settings.selection, full_backend(runner)
    args = sglang_versions.resolved(runner.server_args)
    return ResidentBackend(
        runner,
        full,
        link,
        home,
        cache_device=cache_device,
        is_far=is_far,
        selection=selection,
        dense=dense_steps(selection),
        runtime=runtime,
        probe=AttentionProbe.from_environment(
            settings=settings,
            has_graphs=str(runner.device) != "cpu" and not args.disable_cuda_graph,
            model=runtime.model,
            keys=layers_of_pool(runner.token_to_kv_pool, runtime.model.num_layers)[0],
            resident_positions=link.resident_positions,
            log_weight=None if home.samples is None else home.samples.log_weight,
        ),
        staging=prefix_staging(runner, runtime, full),
    )


def prefix_staging(runner: Any, runtime: runtime_module.Runtime, full: Any) -> PrefixStaging | None:
    """Return what copies prefixes for `full`, SGLang's backend; None if the pool is beside it."""
    placement, device = runtime.settings.placement, with_index(torch.device(runner.device))
    # By messages the model's GPU has all K/V as well.
    if not placement.has_far_pool or placement.has_far_host or device.type != "cuda":
        return None
    pool = runner.token_to_kv_pool
    longest = min(int(runner.req_to_token_pool.req_to_token.shape[1]), token_slots(pool))
    return PrefixStaging(full, pool, longest, device, runtime.counters)


def _engine_pools(runner: Any, home: ResidentHome) -> EnginePools:
    """Return SGLang's K and V, and the resident sets."""
    pool = runner.token_to_kv_pool
    num_slots = token_slots(pool)
    keys, values = layers_of_pool(pool, len(home.sets))
    return EnginePools(
        k=[t[:num_slots] for t in keys],
        v=[t[:num_slots] for t in values],
        resident=home.sets,
        page_size=int(runner.page_size),
        log_weight=None if home.samples is None else home.samples.log_weight,
        shard=HeadShard(before=_heads_before(runner)),
    )


def _heads_before(runner: Any) -> int:
    return heads_before(
        int(runner.model_config.get_total_num_kv_heads()),
        sglang_versions.tensor_size(),
        sglang_versions.tensor_rank(),
    )


def refresh_for(runner: Any, selection: SelectionSettings) -> RefreshSchedule:
    """Return which steps of a sparse request are slow.

    Raises `SettingsError` if that is told by tokens, and the model's vocabulary has none of those.
    """

    def load() -> Any:
        from transformers import AutoTokenizer

        args = sglang_versions.resolved(runner.server_args)
        path = args.tokenizer_path or str(runner.model_config.model_path)
        return AutoTokenizer.from_pretrained(path)

    return schedule_for(selection, load)


def dense_steps(selection: SelectionSettings) -> DenseSteps:
    """Return what is attended to as a whole, by these settings."""
    base = DenseLengths.of(selection, selection.num_resident)
    return DenseSteps(base, selection.dense_batch_tokens or 0)


def make_home(
    runner: Any, settings: RankSettings, model: ModelSpec, device: torch.device
) -> ResidentHome:
    """Place the resident sets.

    Raises `ContractError` if the plugin did not build SGLang's pool.
    """
    selection, pool = settings.selection, runner.token_to_kv_pool
    rows1, num_slots = int(runner.req_to_token_pool.req_to_token.shape[0]), token_slots(pool)
    width, is_on_host = selection.num_resident, settings.placement.host_engine
    sizes: dict[str, Any] = {
        "num_resident": width,
        "num_recent": selection.num_recent_tokens,
        "num_dense": dense_steps(selection).num_dense,
        "max_batch": rows1 - 1,
        "device": device,
    }
    mapped: MappedTensors | None = getattr(pool, "mapped", None)
    allocate = zeros_on(device)
    if mapped is not None and not is_on_host:  # such an engine writes to no sets
        allocate = partial(mapped.allocate, home="inference")
    if settings.placement.has_far_pool:
        table = RingTable(**sizes)
        return OwnSet(pool, table, model, selection, allocate, keeps_sink=is_on_host)
    longest = model.max_context if selection.declared.has_slow_steps else 0
    shape = (rows1, width, model.num_kv_heads, model.head_dim)
    sets = _behind_tokens(layers_of_pool(pool, model.num_layers), num_slots, shape, model)
    samples = None
    if selection.num_samples:
        samples = StepSamples(pool, model, selection, rows1 - 1, allocate)
    return ResidentHome(
        pool, AttendTable(**sizes, first_slot=num_slots, longest=longest), sets, samples
    )


def _behind_tokens(
    stored: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]], num_slots: int,
    shape: tuple[int, int, int, int], model: ModelSpec,
) -> list[tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Return each layer's resident sets of `shape` ``[rows, R, H, D]``; R is 0 in other layers.

    `stored`: K and V of the layers of SGLang's pool.

    Raises `ContractError` if there is no room for them behind the `num_slots` of tokens.
    """
    sets = []
    for layer, buffers in enumerate(zip(*stored, strict=True)):
        width = 0 if layer in model.other_layers else shape[1]
        needed = num_slots + shape[0] * width
        if width and len(buffers[0]) < needed:
            raise ContractError(
                f"SGLang's pool has {len(buffers[0])} slots, resident sets need {needed}: it was "
                "not built by the plugin"
            )
        own = (shape[0], width, *shape[2:])
        k, v = (buffer[num_slots:needed].view(own) for buffer in buffers)
        sets.append((k, v))
    return sets


def full_backend(runner: Any) -> Any:
    """SGLang's own attention backend for the device, one for sinks and windows where they are.

    FlashInfer's takes no sinks, and with windows it is wrong in SGLang 0.5.17: prompts without a
    prefix have none, and behind a prefix full layers read new tokens before these are written.
    Raises `ContractError` if FlashInfer's cannot be told that a model reads images.
    """
    if torch.device(runner.device).type == "cpu":
        return NativeAttention(runner)
    if architecture_of(runner.model).has_sinks or runner.sliding_window_size is not None:
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        return TritonAttnBackend(runner)
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    backend = FlashInferAttnBackend(runner, init_new_workspace=True)
    # `_for_text` has told SGLang that no model reads images. Stock computes the prompts of those
    # that do by its paged kernel, whose sums are not the other one's, and so do we.
    if not hasattr(backend, "is_multimodal"):
        raise ContractError("SGLang's FlashInferAttnBackend has no is_multimodal")
    config = runner.model_config
    backend.is_multimodal = config.hf_config is not config.hf_text_config
    return backend


def local_model_spec(runner: Any) -> ModelSpec:
    """Shape of the model with the heads of this tensor-parallel rank.

    Raises `UnsupportedModelError` or `ContractError` if the model cannot be served, or SGLang has
    built another one.
    """
    table = runner.req_to_token_pool.req_to_token
    model = rank_model_spec(runner.model_config, runner.kv_cache_dtype, table)
    check_live_attention(runner.model, model)
    return model


def check_kv_dtype(runner: Any, settings: RankSettings) -> None:
    """Refuse K and V of another dtype than the settings say, or with scales.

    Raises `SettingsError`, with what to do.
    """
    wanted = settings.cache.stored_dtype or str(runner.model_config.dtype).removeprefix("torch.")
    found = str(runner.kv_cache_dtype).removeprefix("torch.")
    if found != wanted:
        raise SettingsError(
            f"the checkpoint has K and V kept in {found}, and kv_dtype={settings.cache.kv_dtype} "
            f"means {wanted}; use --kv-cache-dtype {'fp8_e4m3' if found == FP8_KV else 'auto'}"
        )
    device = torch.device(runner.device)
    if found == FP8_KV and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise SettingsError(
            "kv_dtype=fp8_e4m3 takes a GPU of compute capability 8.9 or more, whose instructions "
            "convert FP8; use --kv-cache-dtype auto"
        )
    for index, layer in enumerate(layers_of(runner.model)):
        attention = getattr(attention_of(layer), "attn", None)
        # Scales from a file of their own are in the first two names alone.
        names = ("k_scale", "v_scale", "k_scale_float", "v_scale_float")
        scales = {name: _scale_of(getattr(attention, name, None)) for name in names}
        scales = {name: scale for name, scale in scales.items() if scale != 1.0}
        if scales:
            raise SettingsError(
                f"layer {index}: there are scales {scales} for K and V in FP8, which are not "
                "supported; use --kv-cache-dtype auto with a checkpoint without them"
            )


def _scale_of(scale: Any) -> Any:
    """Return the number of a scale, which SGLang has as None, a number or a tensor, or numbers."""
    if scale is None or bool(torch.as_tensor(scale == 1.0).all()):
        return 1.0
    return scale.tolist() if isinstance(scale, torch.Tensor) else scale


def check_sizes(runner: Any, settings: RankSettings) -> None:
    """Refuse a pool of another size than was asked for.

    Raises `SettingsError`, with what to pass.
    """
    selection, page_size = settings.selection, int(runner.page_size)
    capacity = settings.cache.capacity_tokens
    if runner.max_total_num_tokens < capacity // page_size * page_size:
        raise SettingsError(
            f"capacity_tokens={capacity} does not fit this GPU: SGLang sized its pool to "
            f"{runner.max_total_num_tokens}; lower --cache-tokens, or pass a higher "
            "--mem-fraction-static to SGLang"
        )
    check_dense(selection, settings.placement)
    placement, declared = settings.placement, selection.declared
    # Of link message on CPUs the engine attends, and what it selects comes here behind the step.
    # So does an engine on the CPU beside a GPU.
    attends_there = placement.has_far_host and placement.model_device == "cpu"
    is_apart = placement.has_far_pool and not (attends_there or placement.host_engine)
    is_slow_by_messages = declared.has_slow_steps and placement.has_far_host
    if is_apart and (declared.attends or is_slow_by_messages):
        raise SettingsError(
            f"policy={selection.policy} attends to tokens that are not resident, and with "
            f"transport={placement.link} these are not where the model is; use --cache-ranks 0"
        )
    if selection.index_dtype == "int4" and selection.num_recent_tokens < page_size:
        raise SettingsError(
            f"index_dtype=int4 needs num_recent_tokens={selection.num_recent_tokens} of at least "
            f"page_size={page_size}, so that every candidate lies in a finished page; use "
            f"--recent-tokens {page_size}, or leave out SGLang's --page-size"
        )
