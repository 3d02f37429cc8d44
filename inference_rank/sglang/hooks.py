# SPDX-License-Identifier: Apache-2.0
"""Every place where the plugin reaches into SGLang: one table, one small function each."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from tandemkv.cache_rank.protocol.fault_points import reach
from tandemkv.cache_rank.protocol.models.attention_config import windowed_layers
from tandemkv.cache_rank.protocol.models.model_spec import architecture_of_config, read_config
from tandemkv.cache_rank.protocol.node_store import meeting_place
from tandemkv.inference_rank import progress
from tandemkv.inference_rank import runtime as runtime_module
from tandemkv.inference_rank.attention import graph_variants
from tandemkv.inference_rank.resume import hooks as resume_hooks

from . import aborts, grammars, nodes, single_process_group, teacher_forcing
from . import versions as sglang_versions
from .pool import make_local_pool_class, resident_slots

Hook = tuple[str, Callable[..., Any], HookType]

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_CELL_SIZE = (
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size"
)
_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_MANAGER = "sglang.srt.managers.tokenizer_manager"
_SIGNALS = f"{_MANAGER}.SignalHandler"

_req_to_token_pool: Any = None
"""SGLang's request table, noted before the pool is built."""


def register_backend(name: str) -> None:
    """Make ``--attention-backend tandemkv`` known to SGLang."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if name not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([name])

    @register_attention_backend(name)
    def _create(runner: Any) -> Any:
        from tandemkv.inference_rank.process import start

        start(runner, [target for target, _, _ in scheduler_hooks(name)])
        from tandemkv.inference_rank.start.local import create_backend

        return create_backend(runner)


def scheduler_hooks(backend: str) -> list[Hook]:
    """Hooks of the process that runs the model.

    Raises `SettingsError` if no settings were handed over.
    """
    placement = runtime_module.settings_from_environment().placement
    around: dict[str, Callable[..., Any]] = {
        f"{_SCHEDULER}.on_idle": progress.around_idle,
        f"{_SCHEDULER}.abort_request": aborts.around_abort,
        f"{_SCHEDULER}.run_batch": _run_batch,
        "sglang.srt.managers.load_snapshot.shm_path_for": _keep_loads_in_run_dir,
        "sglang.srt.utils.common.support_triton": _never_triton(backend),
        f"{_GRAPHS}.capture_one_shape": graph_variants.capture_each,
        f"{_GRAPHS}._resolve_lora_variant": graph_variants.resolve,
        f"{_CONFIGURATOR}._build_mha_kv_pool": _build_pool,
        f"{_CONFIGURATOR}._build_hybrid_linear_kv_pool": _build_pool,
        "sglang.srt.distributed.bootstrap.init_distributed_environment": _meet_over_a_file,
        "torch.distributed.new_group": single_process_group.around_new_group,
        "torch.distributed.monitored_barrier": single_process_group.around_monitored_barrier,
        "sglang.srt.layers.sampler.Sampler.forward": teacher_forcing.around_sampler,
        **dict.fromkeys(sglang_versions.masked_logits(), grammars.around_logits_bias),
        # Some models let RoPE's kernel write K/V; the backend writes them, and not to this pool
        # alone.
        "sglang.srt.models.utils.enable_fused_set_kv_buffer": lambda *_: False,
        sglang_versions.adjustments(): _as_a_backend_with_sinks(backend),
        **sglang_versions.mended_logprobs(),
    }
    if placement.has_far_pool:
        around[_CELL_SIZE] = lambda *_, **__: 0  # the pool lies elsewhere
    if runtime_module.nodes_from_environment() is not None:
        around[sglang_versions.BIND_THREADS] = sglang_versions.bind_threads_of_one
    return [
        (f"{_SCHEDULER}.process_input_requests", progress.on_turn, HookType.BEFORE),
        ("sglang.srt.layers.radix_attention.RadixAttention.forward", progress.on_layer,
         HookType.BEFORE),
        (f"{_CONFIGURATOR}._build_token_to_kv_pool", _note_table, HookType.BEFORE),
        (f"{_GRAPHS}.capture", _after_capture, HookType.AFTER),
        ("sglang.srt.configs.model_config.ModelConfig.__init__", _for_text, HookType.BEFORE),
        *((target, hook, HookType.AROUND) for target, hook in around.items()),
        *(resume_hooks.hooks() if placement.maps_memory else []),
    ]  # fmt: skip


def _for_text(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # The edge accepts text alone. SGLang then needs no processor of images, and its first request
    # has none.
    return args, kwargs | {"enable_multimodal": False}


def _as_a_backend_with_sinks(backend: str) -> Callable[..., None]:
    # SGLang runs gpt-oss with the backends of a list only: those that take its sinks, as ours does.
    def adjust(original: Callable[..., None], args: Any, *rest: Any, **options: Any) -> None:
        with sglang_versions.taken_for(args, backend, "triton"):
            original(args, *rest, **options)

    return adjust


def _never_triton(backend: str) -> Callable[..., bool]:
    # An unknown backend counts as Triton-capable, which a CPU is not.
    return lambda original, name: name != backend and original(name)


def http_hooks() -> list[Hook]:
    """Hooks of the process that serves HTTP, or that has the schedulers of a host without it."""
    from tandemkv.inference_rank.edge import install

    from .http_routes import serve_http
    from .shutdown import around_sigquit, around_sigterm
    from .start_method import around_get_tokenizer, choose_start_method

    around: dict[str, Callable[..., Any]] = {
        **install.AROUND,
        "sglang.srt.utils.hf_transformers.tokenizer.get_tokenizer": around_get_tokenizer,
        f"{_SIGNALS}.sigterm_handler": around_sigterm,
        f"{_SIGNALS}.running_phase_sigquit_handler": around_sigquit,
        f"{_MANAGER}.TokenizerManager.create_abort_task": aborts.around_abort_task,
        **sglang_versions.held_ids(),
    }
    address = runtime_module.nodes_from_environment()
    if address is not None:
        around["sglang.srt.entrypoints.engine.launch_dummy_health_check_server"] = partial(
            nodes.serve_schedulers, address=address
        )
    setup = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
    return [
        ("sglang.srt.entrypoints.engine._set_envs_and_config", choose_start_method, HookType.AFTER),
        (setup, serve_http, HookType.BEFORE),
        *((target, hook, HookType.AROUND) for target, hook in around.items()),
    ]


def _note_table(self: Any, *_: Any, req_to_token_pool: Any, **__: Any) -> None:
    global _req_to_token_pool
    _req_to_token_pool = req_to_token_pool


def _build_pool(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    settings = runtime_module.settings_from_environment()
    selection, base = settings.selection, kwargs["mha_pool_class"]
    if settings.placement.maps_memory:
        from tandemkv.inference_rank.links.pool import make_shared_pool_class

        kwargs["mha_pool_class"] = make_shared_pool_class(base, self, _req_to_token_pool)
        return original(self, **kwargs)
    num_rows = len(_req_to_token_pool.req_to_token)
    extra = resident_slots(selection, num_rows, int(self.pool_page_size))
    config = read_config(Path(self.model_config.model_path))
    windowed = windowed_layers(config, architecture_of_config(config))
    kwargs["mha_pool_class"] = make_local_pool_class(base, extra, windowed)
    return original(self, **kwargs)


def _meet_over_a_file(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace SGLang's TCP rendezvous, which listens on every interface, and gloo if it is alone.

    Tensor-parallel ranks of one host are children of one process, whose id names their file.
    """
    size = kwargs.get("world_size")
    if "backend" in kwargs:
        kwargs["backend"] = single_process_group.without_listener(kwargs["backend"], size)
    address = runtime_module.nodes_from_environment()
    if address is not None:
        kwargs["distributed_init_method"] = meeting_place(address)
    elif "distributed_init_method" in kwargs:
        owner = os.getpid() if size == 1 else os.getppid()
        path = runtime_module.run_dir_from_environment().path / f"sglang-store-{owner}"
        kwargs["distributed_init_method"] = f"file://{path}"
    return original(*args, **kwargs)


def _keep_loads_in_run_dir(_original: Callable[..., str], *_: Any, **__: Any) -> str:
    """Put the shared file of SGLang's load where it is removed with everything else."""
    return str(runtime_module.run_dir_from_environment().path / "sglang-loads.shm")


@runtime_module.noted
def _after_capture(runtime: Any, _result: Any, graphs: Any, *_: Any) -> None:
    if runtime.measurement is not None:
        runtime.measurement.after_capture(graphs)


@runtime_module.around
def _run_batch(
    runtime: Any, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    _note_batch(runtime, batch)
    rows = [sglang_versions.row_of(req) for req in batch.reqs]
    runtime.rows_on_host = None if None in rows else rows
    run = original if runtime.client is None else partial(runtime.passes.run, original)
    try:
        return run(scheduler, batch, *args, **kwargs)
    finally:
        runtime.rows_on_host = None


def _note_batch(runtime: Any, batch: Any) -> None:
    """Remember whose pass comes next, and which prompt does not end in it."""
    reach("inference_rank.batch")
    runtime.middle_chunk_row = None
    chunked = getattr(batch, "chunked_req", None)
    if chunked is not None and any(chunked is req for req in batch.reqs):
        runtime.middle_chunk_row = sglang_versions.row_of(chunked)
    runtime.running_reqs = batch.reqs
    if runtime.settings.evaluation:
        lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        runtime.running_lengths = lengths.tolist()
