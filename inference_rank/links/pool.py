# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV pool and request table in memory that the engine's process maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tandemkv.cache_rank.protocol.engine_program import check_other_layers
from tandemkv.cache_rank.protocol.errors import AlreadyServedError, ContractError
from tandemkv.cache_rank.protocol.ipc import server_pid
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes, MappedTensors
from tandemkv.cache_rank.protocol.memory.shared_devices import inference_homes, one_gpu_homes
from tandemkv.cache_rank.protocol.memory.shared_region import RegionSizes, layers_of_pool
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec, read_model_spec, shard_of
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.inference_rank import runtime as runtime_module
from tandemkv.inference_rank.sglang import versions as sglang_versions

from .connection import KEPT
from .kept_tensors import make_tensors


def make_shared_pool_class(base: Any, configurator: Any, req_to_token_pool: Any) -> type:
    """Return a subclass of SGLang's ``MHATokenToKVPool`` whose K/V are mapped tensors.

    On one device the resident sets lie behind the tokens. SGLang's allocator does not know them: it
    goes by the pool's `size`. On two GPUs K/V are memory of the engine's, or of several engines'
    layer by layer, which SGLang's kernels write over NVLink; prefixes are copied from there
    (`PrefixStaging`). Beside an engine on the CPU they are host memory, written over PCIe. SGLang's
    request table is replaced by a mapped one, as the engine reads it. `req_to_token_pool`, SGLang's
    request table, is still empty.
    """

    class SharedKVPool(base):
        """K/V of all requests, mapped by two processes."""

        size: int
        mapped: MappedTensors
        mapped_sizes: RegionSizes

        def _create_buffers(self) -> None:
            if self.is_quantized_kv_cache or self.kv_cache_layout != "nhd":
                raise ContractError(
                    f"SGLang lays out K/V as {self.kv_cache_layout}; transport=shared needs plain "
                    "[slots, heads, dim]: serve without a quantised KV cache"
                )
            sglang_versions.without_scales(self)
            self.mapped_sizes, self.mapped = _kept_for(
                self, configurator.model_config, req_to_token_pool.req_to_token
            )
            req_to_token_pool.req_to_token = self.mapped["req_to_token"]
            layers = layers_of_pool(self.mapped, self.mapped_sizes)
            pairs = [layer.view(self.store_dtype).unbind() for layer in layers]
            self.k_buffer, self.v_buffer = (list(part) for part in zip(*pairs, strict=True))
            sglang_versions.describe_buffers(self)

    return SharedKVPool


def _kept_for(pool: Any, config: Any, table: torch.Tensor) -> tuple[RegionSizes, MappedTensors]:
    """Return what outlives an epoch, for SGLang's `pool` and request `table`.

    Raises `SettingsError` if the model has layers that a cache rank is in the way of,
    `AlreadyServedError` if another inference rank of the run directory uses the memory.
    """
    settings = runtime_module.settings_from_environment()
    placement = settings.placement
    sizes = RegionSizes(
        num_slots=int(pool.size) + int(pool.page_size),
        num_rows=int(table.shape[0]),
        page_size=int(pool.page_size),
        is_apart=placement.has_far_pool,
        num_sharing=placement.head_shards,
        has_whole_pool=placement.has_far_host,
        maps_sets=not placement.host_engine,
    )
    model = rank_model_spec(config, pool.dtype, table)
    check_other_layers(model, placement)
    device = with_index(torch.device(pool.device))
    if placement.has_far_host:
        homes = one_gpu_homes(device)
    elif placement.host_engine:
        homes = Homes.beside_gpu(device, here=device)
    else:
        homes = inference_homes(device, placement.tp_per_node, placement.num_sharing)
    run_dir = rank_run_dir(placement)
    # What the launcher holds is emptied for its next user. This process serves its status later.
    if server_pid(run_dir.inference_socket) is not None:
        raise AlreadyServedError(
            f"{run_dir.path}: a live inference rank uses its memory; stop that one or give another "
            "--run-dir"
        )
    return sizes, make_tensors(KEPT, model, settings, sizes, homes, run_dir)


def rank_run_dir(placement: Placement, index: int = 0) -> RunDir:
    """Return where this tensor-parallel rank meets cache rank `index` of its own."""
    number = sglang_versions.tensor_rank() * placement.head_shards + index
    return runtime_module.run_dir_from_environment().of_rank(number)


def rank_model_spec(config: Any, kv_dtype: torch.dtype, table: torch.Tensor) -> ModelSpec:
    """Return the shape of SGLang's model, with the heads of this tensor-parallel rank.

    `kv_dtype` is that of K and V where they are kept; `table`, the request table, is as wide as the
    longest request. Raises `UnsupportedModelError` if the model cannot be served.
    """
    model = read_model_spec(
        Path(config.model_path),
        dtype=str(config.dtype).removeprefix("torch."),
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        max_context=int(table.shape[1]),
    )
    return shard_of(model, sglang_versions.tensor_size())


def with_index(device: torch.device) -> torch.device:
    """Return `device` with the index of the current GPU if it has none."""
    index: int | None = device.index  # the stubs have it as int
    if device.type != "cuda" or index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
