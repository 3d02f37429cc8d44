# SPDX-License-Identifier: Apache-2.0
"""Command lines and environments of the two processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tandemkv.cache_rank.protocol.memory.one_device import is_apart_on_one_device
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    NODES_VARIABLE,
    RUN_DIR_VARIABLE,
    SETTINGS_VARIABLE,
)
from tandemkv.inference_rank.edge.settings import EDGE_VARIABLE
from tandemkv.inference_rank.sglang.drain import DRAIN_TIMEOUT_VARIABLE
from tandemkv.server.plan.pages import check_chunk, page_tokens
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sglang_args import value_of
from tandemkv.server.settings.sources import ENVIRONMENT_PREFIX

from .nodes import INTERFACE_VARIABLE, LOOPBACK, interface_to_nodes

CPU_CHUNK_TOKENS = 2048
"""Default of --chunked-prefill-size on cpu: bounds the memory of one forward pass."""

SERVER = (sys.executable, "-P", "-m", "tandemkv.server")
"""Our own command line, as a child is started."""

_CUDA_FLAGS = ("--device", "cuda", "--cuda-graph-backend-prefill", "disabled")
_NO_FUSED_REDUCE = "--enforce-disable-flashinfer-allreduce-fusion"
_CORES_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
_SHARED_GPU_ENV = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Streams that wait for the other process must not hold up others in a queue of the GPU."""
_NODES_ENV = {
    # Its reader on another host would unpickle what comes from a port without a key.
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false",
    # Hosts may have different amounts of free memory; what is used of it is set.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
}
_CPU_FLAGS = (
    "--device", "cpu", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--disable-cuda-graph", "--skip-server-warmup", "--sleep-on-idle",
)  # fmt: skip


def sglang_argv(
    settings: ServeSettings, *, model_dir: Path, device: str, dtype: str, port: int
) -> tuple[str, ...]:
    """Return the command line of SGLang's server. The user's own arguments come last.

    `device`, `dtype` and `port` are resolved, i.e. not ``auto`` and not 0. Raises `SettingsError`
    if a chunk of a prompt would end within a page, which SGLang asserts that none does.
    """
    selection = settings.selection
    page_size = 1
    if device != "cpu" and not selection.declared.attends:  # which scans no pages
        page_size = page_tokens(selection.index_dtype, selection.num_recent_tokens)
        given = value_of(settings.sglang_args, "--page-size") or ""
        is_number = given.isdecimal() and int(given) > 0  # else SGLang refuses it
        page_size = int(given) if is_number else page_size
    argv = [
        sys.executable, "-P", "-m", "sglang.launch_server",
        "--model-path", str(model_dir),
        "--served-model-name", served_name(settings),
        "--attention-backend", "tandemkv",
        "--host", settings.host,
        "--port", str(port),
        "--dtype", dtype,
        "--page-size", str(page_size),
        "--max-running-requests", str(settings.max_running_requests),
        "--max-total-tokens", str(settings.cache.capacity_tokens),
        "--kv-cache-dtype", settings.cache.kv_dtype,
        "--enable-metrics",
        # One pool for all layers, sliding windows or not: resident sets lie behind its tokens.
        "--disable-hybrid-swa-memory",
    ]  # fmt: skip
    argv += _CPU_FLAGS if device == "cpu" else _CUDA_FLAGS
    is_captured = settings.rank_settings.placement.host_engine or selection.declared.is_captured
    if device != "cpu" and not is_captured:
        argv.append("--disable-cuda-graph")
    argv += _overlap_flags(settings, device)
    if settings.tensor_parallel > 1:
        # SGLang switches this on for some models, and a layer's input is then a part of the sum.
        argv += ["--tp-size", str(settings.tensor_parallel), _NO_FUSED_REDUCE]
    if settings.nodes_address is not None:
        argv += ["--nnodes", str(settings.nnodes), "--node-rank", str(settings.node_rank)]
        argv += ["--dist-init-addr", settings.nodes_address]
        if device != "cpu":
            # It is for GPUs of one host, which SGLang takes hosts that share /dev/shm for.
            argv.append("--disable-custom-all-reduce")
    argv += _chunk_flags(settings, device, page_size)
    if settings.max_context is not None:
        argv += ["--context-length", str(settings.max_context)]
    return (*argv, *settings.sglang_args)


def _overlap_flags(settings: ServeSettings, device: str) -> tuple[str, ...]:
    """Return whether SGLang prepares a pass while one runs: not on a CPU.

    There a pass is done when it has been queued, and its tokens would wait for the next one. What
    is laid out as for two GPUs is scheduled as there.
    """
    placement = settings.rank_settings.placement
    if placement.has_far_host:
        # SGLang gives a prompt's chunk to the radix tree while the next pass is prepared: before it
        # is known that the other host has its K/V.
        return ("--disable-overlap-schedule",)
    is_paired = placement.host_engine or (placement.maps_memory and is_apart_on_one_device())
    return () if device != "cpu" or is_paired else ("--disable-overlap-schedule",)


def _chunk_flags(settings: ServeSettings, device: str, page_size: int) -> tuple[str, ...]:
    """Return how much of a prompt SGLang computes at once; nothing leaves it to SGLang."""
    chunk = settings.chunked_prefill_size or (CPU_CHUNK_TOKENS if device == "cpu" else None)
    if chunk is None:
        return ()
    check_chunk(chunk, page_size)
    return ("--chunked-prefill-size", str(chunk))


def sglang_env(
    settings: ServeSettings, environ: Mapping[str, str], *, run_dir: Path, device: str
) -> dict[str, str]:
    """Return the environment of SGLang and of the processes that it spawns."""
    env = common_env(environ, device=device)
    env.update(
        HF_HUB_OFFLINE="1",
        SGLANG_PLUGINS="tandemkv",
        **{
            SETTINGS_VARIABLE: settings.rank_settings.model_dump_json(),
            EDGE_VARIABLE: settings.edge.model_dump_json(),
            RUN_DIR_VARIABLE: str(run_dir),
            NODES_VARIABLE: settings.nodes_address or "",
            DRAIN_TIMEOUT_VARIABLE: str(settings.drain_timeout_s),
        },
    )
    # Without a name SGLang's gloo takes the interface of the host's own name, and NCCL the first
    # that is not loopback; both listen there.
    if INTERFACE_VARIABLE not in env:
        env[INTERFACE_VARIABLE] = interface_to_nodes(settings)
    if settings.nodes_address is not None:
        env |= _NODES_ENV
    if settings.tensor_parallel > 1:
        nodes_interface = f"={env[INTERFACE_VARIABLE]}"  # that name, not all that begin so
        env.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK if settings.nnodes == 1 else nodes_interface)
    env["SGLANG_USE_CPU_ENGINE"] = str(int(device == "cpu"))
    if device == "cpu":
        if settings.tensor_parallel > 1:
            # Else SGLang takes a NUMA node for each rank, and refuses where there are fewer.
            env.setdefault(_CORES_VARIABLE, _cores_of_ranks(settings))
        # The first request with a penalty would wait a minute for a compiler, and all others.
        env.setdefault("TORCHDYNAMO_DISABLE", "1")
    if device == "cuda" and settings.rank_settings.placement.maps_memory:
        env = _SHARED_GPU_ENV | env
    return env


def _cores_of_ranks(settings: ServeSettings) -> str:
    """Return the cores of each process of --tp, as SGLang reads it: ``0-1|2-3``.

    It looks for a process's own by its number of all nodes.
    """
    cores, here = sorted(os.sched_getaffinity(0)), settings.tensor_parallel // settings.nnodes
    ends = [len(cores) * rank // here for rank in range(here + 1)]
    parts = [",".join(map(str, cores[first:end])) for first, end in pairwise(ends)]
    return "|".join(parts * settings.nnodes)


def cache_rank_argv(
    *, run_dirs: Sequence[Path], config: Path, rank: int = 0, words: Sequence[str] = ("cache-rank",)
) -> tuple[str, ...]:
    """Return the command line of the cache rank; `config` is what ``--print-settings`` prints.

    `run_dirs` are those of its engines, and `rank` is its number, of all cache ranks. `words` are
    our own command, a pump's for example.
    """
    folders = [word for path in run_dirs for word in ("--run-dir", str(path))]
    number = ("--rank", str(rank)) if rank else ()
    return (*SERVER, *words, *folders, *number, "--config", str(config))


def cache_rank_env(environ: Mapping[str, str], *, device: str) -> dict[str, str]:
    """Return the environment of the cache rank; its settings come from the file alone."""
    env = common_env(environ, device=device)
    if device == "cuda":
        # On one GPU, under MPS, the forward pass goes first.
        return {"CUDA_MPS_CLIENT_PRIORITY": "1"} | _SHARED_GPU_ENV | env
    return env


def served_name(settings: ServeSettings) -> str:
    """Name of the model in the OpenAI API: the user's, or that of its folder."""
    given = value_of(settings.sglang_args, "--served-model-name")
    return given or Path(settings.model).expanduser().resolve().name


def common_env(environ: Mapping[str, str], *, device: str) -> dict[str, str]:
    """Return the environment of a child on `device`: without settings, and with one OpenMP team."""
    env = {name: text for name, text in environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    env.update(PYTHONSAFEPATH="1", PYTHONUNBUFFERED="1")
    if device == "cpu":  # two OpenMP teams that spin on shared cores cost ten times
        env.setdefault("OMP_NUM_THREADS", "1")
    return env
