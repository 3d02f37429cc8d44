# SPDX-License-Identifier: Apache-2.0
"""Decode attention to everything, where the K/V lie: on the cache rank's GPU."""

from __future__ import annotations

from typing import Any

import torch

from tandemkv.cache_rank.protocol.engine import Engine
from tandemkv.kernels.flags import send_rows

from .layer_streams import LayerStreams
from .peer_memory import seen_from
from .side_stream import SideStream


class RemoteAttention:
    """Sends a layer's query to the cache rank's GPU, and takes the layer's output back.

    The other way, reading K/V over NVLink, takes 5.7 ms a layer at 8 x 64K instead of about 0.6
    (two H200, Qwen3-8B's shape).

    Parameters
    ----------
    rank : Engine
        Attends.
    pool : Any
        SGLang's pool, which the forward pass writes to.
    side : SideStream
        Has a lane and a row of flags that nothing else uses.
    queries : LayerStreams
        Buffers on the cache rank's device.
    lane, row : int
        That lane; and that row, of flags that the forward pass raises.
    max_batch, width : int
        Requests, and ``Hq * D``.
    dtype : torch.dtype
        Of queries and outputs.
    device, cache_device : torch.device
        Of the forward pass and of the cache rank.
    """

    def __init__(
        self, rank: Engine, pool: Any, side: SideStream, queries: LayerStreams,
        *, lane: int, row: int, max_batch: int, width: int, dtype: torch.dtype,
        device: torch.device, cache_device: torch.device,
    ) -> None:  # fmt: skip
        self._rank, self._pool, self._side, self._queries = rank, pool, side, queries
        self._lane, self._row, self._size = lane, row, 0
        # One for all layers: a layer's output is used up before the next layer's query is sent.
        self._outputs = torch.zeros((max_batch, width), dtype=dtype, device=device)
        self._outputs_there = seen_from(cache_device, self._outputs)

    def begin(
        self, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Write k, v at the step's slots, and let the other GPU attend with ``query [B, Hq, D]``.

        Returns the query, on that GPU.
        """
        index, size, side = layer.layer_id, len(query), self._side
        self._size = size
        if save_kv_cache:
            store_tokens(self._pool, layer, forward_batch, k, v)
        signal = side.signal(self._row, size)
        there = self._queries.put(index, query.flatten(1), None, [signal]).view(query.shape)
        with side.fork(there, lane=self._lane, signal=signal):
            out = self._rank.attend(index, there).flatten(1)
            flags = side.done_flags(index, size)
            if flags is None:
                self._outputs_there[:size].copy_(out)
            else:
                send_rows(out, None, self._outputs_there[:size], flags)
            side.note_done(index, size)
        return there

    def end(self, layer: int) -> torch.Tensor:
        """Wait for the output of `layer`, ``[B, Hq * D]``; valid until the next layer's."""
        self._side.join(layer)
        return self._outputs[: self._size]


def store_tokens(
    pool: Any, layer: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write a step's tokens to SGLang's pool, as its own attention of `layer` would do it."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    shape = (-1, layer.tp_k_head_num, layer.head_dim)
    location = KVWriteLoc(forward_batch.out_cache_loc, None)
    pool.set_kv_buffer(layer, location, k.view(shape), v.view(shape))
