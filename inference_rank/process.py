# SPDX-License-Identifier: Apache-2.0
"""Start-up of the plugin in the process that runs the model: checks, status socket, metrics."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.fault_points import enable_faults
from tandemkv.cache_rank.protocol.heartbeat import StatusServer
from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.inference_rank.sglang import versions as sglang_versions
from tandemkv.inference_rank.sglang.contract import check_hooks_applied
from tandemkv.inference_rank.sglang.nodes import check_settings

from . import progress
from . import runtime as runtime_module
from .metrics import MetricsPublisher

_LOG = logging.getLogger(__name__)
_server: StatusServer | None = None


def start(runner: Any, hook_targets: Sequence[str]) -> None:
    """Refuse what cannot work, then answer status requests.

    Raises `ContractError` if a hook was not applied, and `SettingsError` if SGLang runs with an
    option that bypasses the cache rank.
    """
    global _server
    check_hooks_applied(hook_targets)
    note = sglang_versions.not_run(
        sglang_versions.installed() or "", on_gpu=str(runner.device) != "cpu"
    )
    if note:
        _LOG.warning("%s", note)
    settings = runtime_module.settings_from_environment()
    placement = settings.placement
    args = sglang_versions.resolved(runner.server_args)
    all_exact = settings.selection.declared.all_exact
    check_server_args(args, placement, settings.cache.kv_dtype, all_exact=all_exact)
    if placement.num_nodes > 1:
        check_settings(settings, args)
    rank = sglang_versions.tensor_rank()
    node = placement.node_of(rank)
    if rank and placement.node_of(rank - 1) == node:
        return  # the first rank of a host answers for all there
    run_dir = runtime_module.run_dir_from_environment()
    enable_faults("inference_rank", run_dir.path)
    _server = StatusServer(run_dir.inference_socket, status=status)
    if args.enable_metrics:
        sockets = {n: run_dir.of_rank(n).heartbeat_socket for n in placement.engines_of(node)}
        MetricsPublisher(status, sockets, placement.num_engines).start()


def check_server_args(
    args: Any, placement: Placement, kv_dtype: str, *, all_exact: bool = False
) -> None:
    """Refuse options of SGLang that read or write the KV pool behind our back.

    So are those with which a layer gets a part of a batch, or is not called, and a tensor-parallel
    size that there are no cache ranks for. SGLang may have set them itself: `args` are its
    arguments, resolved. Drafts of n-grams are verified where all layers are exact and the engine is
    in this process. Raises `SettingsError`, which names the option.
    """
    drafts = getattr(args, "speculative_algorithm", None)
    is_verified = drafts == "NGRAM" and all_exact and placement.link == "local"
    rejected = {
        "--enable-hierarchical-cache": bool(getattr(args, "enable_hierarchical_cache", False)),
        "--disaggregation-mode": getattr(args, "disaggregation_mode", "null") != "null",
        "--speculative-algorithm": bool(drafts) and not is_verified,
        "--enable-mixed-chunk": bool(getattr(args, "enable_mixed_chunk", False)),
        "--enable-two-batch-overlap": bool(getattr(args, "enable_two_batch_overlap", False)),
        "--moe-a2a-backend": getattr(args, "moe_a2a_backend", "none") != "none",
        "--kv-cache-dtype": getattr(args, "kv_cache_dtype", "auto") != kv_dtype,
        "--tp-size": placement.maps_memory and getattr(args, "tp_size", 1) != placement.tp_size,
        "--pp-size": getattr(args, "pp_size", 1) != 1,
        "--dp-size": getattr(args, "dp_size", 1) != 1,
        "--attn-cp-size": getattr(args, "attn_cp_size", 1) != 1,
        "--dcp-size": getattr(args, "dcp_size", 1) != 1,
    }
    used = [name for name, is_used in rejected.items() if is_used]
    if used:
        raise SettingsError(f"{', '.join(used)}: not supported with tandemkv; remove it")


def status() -> StatusReply:
    """Answer a `StatusRequest`."""
    runtime = runtime_module.current()
    reply = StatusReply(role="inference_rank", epoch=0, ready=False, values={}, info={})
    if runtime is not None:
        reply = runtime.status()
    return msgspec.structs.replace(
        reply,
        ready=reply.ready and progress.has_begun,
        values=reply.values | {"stalled_s": progress.clock.stalled_s()},
    )
