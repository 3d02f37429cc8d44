# SPDX-License-Identifier: Apache-2.0
"""Stand-in for the CPU build of sgl_kernel, which is not on the package index.

With SGLANG_USE_CPU_ENGINE=1 SGLang imports CPU operators from here at module import time. Plain
serving (no draft model, no experts, no quantisation) calls those that are here; the others raise
when called. ``torch.ops.sgl_kernel`` stays empty, so SGLang's layers take their torch path.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

from .speculative import (
    assign_extend_cache_locs_cpu as assign_extend_cache_locs_cpu,
)
from .speculative import (
    copy_all_layer_kv_cache_cpu as copy_all_layer_kv_cache_cpu,
)
from .speculative import (
    fill_accept_out_cache_loc_cpu as fill_accept_out_cache_loc_cpu,
)
from .speculative import verify_tree_greedy_cpu as verify_tree_greedy_cpu

__version__ = "0.0.0+tandemkv.cpu.shim"
__path__: list[str] = []  # importing another submodule fails at once and says so


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new slots into its row of the request table.

    Parameters
    ----------
    req_pool_indices, start, end : torch.Tensor
        ``[num_reqs]``, integer: row, first and last (exclusive) position of each request.
    req_to_token : torch.Tensor
        ``[num_rows, pool_len]``, int32. Written.
    out_cache_loc : torch.Tensor
        ``[sum(end - start)]``, integer: the new slots, request after request.
    pool_len : int
        Columns of `req_to_token`; not needed here.
    """
    offset = 0
    bounds = zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True)
    for row, first, last in bounds:
        count = last - first
        if count > 0:
            slots = out_cache_loc[offset : offset + count]
            req_to_token[row, first:last] = slots.to(req_to_token.dtype)
            offset += count


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Give every other operator a stand-in that raises when called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is not in tandemkv-cpu-shim; plain CPU serving does not need it: "
            "turn off the option that calls it"
        )

    missing.__name__ = name
    return missing
