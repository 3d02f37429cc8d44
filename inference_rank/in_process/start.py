# SPDX-License-Identifier: Apache-2.0
"""Build the in-process cache rank and its attention backend when SGLang asks for one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from tandemkv.cache_rank.protocol.errors import ContractError, SettingsError
from tandemkv.cache_rank.protocol.local import (
    LocalCacheRank,
    LocalPools,
    create_local_cache_rank,
)
from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.cache_rank.protocol.model_spec import ModelSpec, read_model_spec
from tandemkv.cache_rank.protocol.settings import RankSettings
from tandemkv.inference_rank import runtime as runtime_module
from tandemkv.inference_rank.counters import Counters

from .backend import InProcessBackend
from .pool import token_slots
from .query_predictor import LiveQueryPredictor
from .resident_attention import AttendTable


@dataclass(slots=True)
class LocalRuntime:
    """What the plugin's hooks find in a process that has its own cache rank."""

    settings: RankSettings
    model: ModelSpec
    rank: LocalCacheRank
    counters: Counters
    resident_bytes: int
    middle_chunk_row: int | None = None
    running_reqs: list[Any] = field(default_factory=list)
    scheduler: Any = None

    def status(self) -> StatusReply:
        """Answer a `StatusRequest`."""
        selection = self.settings.selection
        values = self.counters.as_values()
        values |= {
            "cache_rank_up": 1.0,
            "resident_bytes": float(self.resident_bytes),
            "resident_slots": float(selection.num_resident),
            "ring_slots": float(selection.num_recent_tokens),
            "index_bytes": float(self.rank.nbytes),
        }
        return StatusReply(
            role="inference_rank",
            epoch=1,
            ready=True,
            values=values,
            info={
                "policy": selection.policy,
                "budget_tokens": str(selection.budget_tokens),
                "exact_layers": ",".join(map(str, selection.exact_layers)) or "none",
                "transport": "local",
                "index_dtype": selection.index_dtype,
                "model": self.model.architecture,
                "pid": str(os.getpid()),
                "lost_reason": "",
            },
        )


def create_backend(runner: Any) -> InProcessBackend:
    """Create this process's cache rank and backend.

    Raises
    ------
    SettingsError, UnsupportedModelError, PolicyError, ContractError
        The server must not start.
    """
    settings = runtime_module.settings_from_environment()
    selection = settings.selection
    device = torch.device(runner.device)
    check_sizes(runner, settings)
    model = local_model_spec(runner)
    pool, rows1 = runner.token_to_kv_pool, int(runner.req_to_token_pool.req_to_token.shape[0])
    max_batch = int(runner.req_to_token_pool.size)
    max_batch = max(max_batch, *getattr(runner.server_args, "cuda_graph_bs", None) or [1])
    num_slots, width = token_slots(pool), selection.num_resident
    k, v = zip(*(pool.get_kv_buffer(layer) for layer in range(model.num_layers)), strict=True)
    needed = num_slots + rows1 * width
    if k[0].shape[0] < needed:
        raise ContractError(
            f"SGLang's pool has {k[0].shape[0]} slots, resident sets need {needed}: it was not "
            "built by the plugin"
        )
    pools = LocalPools(
        k=[t[:needed] for t in k],
        v=[t[:needed] for t in v],
        num_slots=num_slots,
        page_size=int(runner.page_size),
        max_rows1=rows1,
    )
    rank = create_local_cache_rank(
        model=model,
        settings=settings,
        pools=pools,
        max_batch=max_batch,
        predict_query=LiveQueryPredictor(
            runner.model, num_qo_heads=model.num_qo_heads, head_dim=model.head_dim
        ),
    )
    num_dense = width + selection.num_recent_tokens if selection.dense_while_fits else 0
    table = AttendTable(
        num_resident=width,
        num_recent=selection.num_recent_tokens,
        num_dense=num_dense,
        first_slot=num_slots,
        max_batch=max_batch,
        device=device,
    )
    local = LocalRuntime(
        settings=settings,
        model=model,
        rank=rank,
        counters=Counters(),
        resident_bytes=2 * model.num_layers * rows1 * width * k[0][0].nbytes,
    )
    runtime_module.set_current_local(local)
    return InProcessBackend(
        runner,
        full_backend(runner),
        rank,
        table,
        seed_window=selection.seed_window,
        num_dense=num_dense,
        num_resident=width,
        runtime=local,
    )


def full_backend(runner: Any) -> Any:
    """SGLang's own attention backend for the device."""
    if torch.device(runner.device).type == "cuda":
        from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

        return FlashInferAttnBackend(runner, init_new_workspace=True)
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(runner)


def local_model_spec(runner: Any) -> ModelSpec:
    """Shape of the model with the heads of this tensor-parallel rank."""
    from sglang.srt.runtime_context import get_parallel

    config, tp_size = runner.model_config, int(get_parallel().attn_tp_size)
    model = read_model_spec(
        Path(config.model_path),
        dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
        max_context=int(runner.req_to_token_pool.req_to_token.shape[1]),
    )
    return msgspec.structs.replace(
        model,
        num_qo_heads=model.num_qo_heads // tp_size,
        num_kv_heads=int(config.get_num_kv_heads(tp_size)),
    )


def check_sizes(runner: Any, settings: RankSettings) -> None:
    """Refuse a pool of another size than was asked for.

    Raises
    ------
    SettingsError
        With what to pass.
    """
    selection, page_size = settings.selection, int(runner.page_size)
    capacity = settings.cache.capacity_tokens
    if runner.max_total_num_tokens < capacity // page_size * page_size:
        raise SettingsError(
            f"capacity_tokens={capacity} does not fit this GPU: SGLang sized its pool to "
            f"{runner.max_total_num_tokens}; lower --cache-tokens, or pass a higher "
            "--mem-fraction-static to SGLang"
        )
    if selection.index_dtype == "int4" and selection.num_recent_tokens < page_size:
        raise SettingsError(
            f"index_dtype=int4 needs num_recent_tokens={selection.num_recent_tokens} of at least "
            f"page_size={page_size}, so that every candidate lies in a finished page"
        )
