# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV pool with the resident sets behind it, in the same tensors.

Attention kernels take one base address and a list of slots. With the resident sets at the end
of the pool such a list may name both: resident rows first, then the latest tokens where SGLang
wrote them. So there is no ring to copy into, and requests that are attended to as a whole need
no resident set at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

from .versions import describe_buffers


def make_local_pool_class(base: Any, num_extra: int, windowed: Collection[int] = ()) -> type:
    """Return a subclass of SGLang's ``MHATokenToKVPool`` with `num_extra` more slots per layer.

    SGLang's allocator does not know them: it goes by the pool's `size`, which stays. `windowed`
    layers have none of them.
    """

    class LocalKVPool(base):
        """K/V of all requests, and of the resident sets."""

        size: int
        layer_num: int
        k_buffer: list[torch.Tensor]
        v_buffer: list[torch.Tensor]

        def _create_buffers(self) -> None:
            size = self.size
            self.size = size + num_extra
            try:
                if windowed:
                    self._create_layer_by_layer(size)
                else:
                    super()._create_buffers()
            finally:
                self.size = size

        def _create_layer_by_layer(self, size: int) -> None:
            count, keys, values = self.layer_num, list[torch.Tensor](), list[torch.Tensor]()
            self.layer_num = 1
            try:
                for layer in range(count):
                    self.size = size + (0 if layer in windowed else num_extra)
                    super()._create_buffers()
                    keys += self.k_buffer
                    values += self.v_buffer
            finally:
                self.layer_num, self.size = count, size
            self.k_buffer, self.v_buffer = keys, values
            describe_buffers(self)

        def _finalize_allocation_log(self, num_tokens: int) -> None:
            super()._finalize_allocation_log(num_tokens + num_extra)

    return LocalKVPool


def resident_slots(selection: SelectionSettings, max_rows1: int, page_size: int) -> int:
    """Slots that the resident sets of `max_rows1` rows take, rounded up to whole pages."""
    return -(-selection.num_resident * max_rows1 // page_size) * page_size


def as_stored(pool: Any, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `buffers` of `pool` in the dtype that they hold; SGLang keeps FP8 as bytes."""
    return [buffer.view(pool.dtype) for buffer in buffers]


def layers_of_pool(
    pool: Any, num_layers: int
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return K and V of each layer of a model ``[slots, H, D]``, in the dtype that they hold.

    Where some layers are linear attention SGLang's pool has one of the others inside, which numbers
    them among themselves. Linear ones have no slots.
    """
    places = getattr(pool, "full_attention_layer_id_mapping", None)
    if places is None:
        return as_stored(pool, pool.k_buffer), as_stored(pool, pool.v_buffer)
    own = pool.full_kv_pool
    keys, values = as_stored(own, own.k_buffer), as_stored(own, own.v_buffer)
    none, layers = keys[0][:0], range(num_layers)
    return (
        [keys[places[x]] if x in places else none for x in layers],
        [values[places[x]] if x in places else none for x in layers],
    )


def token_slots(pool: Any) -> int:
    """Slots of `pool` that hold tokens, its padding page included."""
    return int(pool.size) + int(pool.page_size)


def store_tokens(
    pool: Any, layer: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write a step's tokens to `pool`, as SGLang's own attention of `layer` would do it."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    shape = (-1, layer.tp_k_head_num, layer.head_dim)
    location = KVWriteLoc(forward_batch.out_cache_loc, None)
    pool.set_kv_buffer(layer, location, k.view(shape), v.view(shape))


class Occupancy:
    """Rows and slots in use, read without waiting, by any thread.

    Slots of the radix cache count as used. While the scheduler is at work a value may be that of a
    moment ago.
    """

    def __init__(self, runner: Any) -> None:
        self._rows, self._slots = runner.req_to_token_pool, runner.token_to_kv_pool_allocator

    def values(self) -> dict[str, float]:
        """Return ``request_rows``, ``slots_used`` and ``slots``."""
        total = int(self._slots.size)
        return {
            "request_rows": float(self._rows.size - self._rows.available_size()),
            "slots_used": float(total - self._slots.available_size()),
            "slots": float(total),
        }
