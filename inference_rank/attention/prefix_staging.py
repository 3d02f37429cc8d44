# SPDX-License-Identifier: Apache-2.0
"""Prefixes whose K/V lie on another GPU, copied beside the model ahead of a prefill's attention.

FlashInfer reads the prefix of a KV head once for each tile of 128 queries: 256 times for a chunk of
8192 tokens with four query heads to each KV head. A GPU's L2 keeps nothing of another one's memory,
so each time would cross NVLink. Here the prefix of a layer crosses it once, while the layers before
are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandemkv.cache_rank.protocol.errors import ContractError
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.links.side_stream import SideStream
from tandemkv.inference_rank.sglang.pool import as_stored
from tandemkv.kernels.gather import gather_tokens
from tandemkv.kernels.streams import LOWEST_PRIORITY

_BUFFERS = 2
"""Layers whose prefixes are held at once: one that is attended to, and the next."""


class PrefixStaging:
    """SGLang's pool as its FlashInfer backend sees it in a prefill pass.

    The backend finds tokens by a list of slots in the order of their positions. Once a pass is
    planned, `begin` puts places in the staging into that list; nothing else of the plan depends on
    it. So FlashInfer does the same sums in the same order as if it read the pool. New tokens are
    written to the pool as ever, and attended to from the tensors that the layer has just made.

    A pass reads the pool itself, and is counted, if its prefixes do not fit even as one layer's
    alone, or if SGLang attends to new tokens in the pool too: in its deterministic mode, with which
    it does not start here, as its list of attention backends for that has not ours.

    `full`, SGLang's backend, gets this in the place of its `pool`. Each of the two buffers holds
    `num_tokens`, the longest prefix of a request. `device` is the model's; a CPU copies in place.
    Counted are ``copied_prefix_tokens_total``, and ``far_prefix_passes_total``.
    """

    def __init__(
        self, full: Any, pool: Any, num_tokens: int, device: torch.device, counters: Counters
    ) -> None:
        self._full, self._pool, self._counters = full, pool, counters
        self._far = list(
            zip(as_stored(pool, pool.k_buffer), as_stored(pool, pool.v_buffer), strict=True)
        )
        keys = self._far[0][0]
        shape = (2, _BUFFERS * num_tokens, *keys.shape[1:])
        self._kv = torch.empty(shape, dtype=keys.dtype, device=device)
        # The stream that decode steps send in: a process with more streams is slower (decision 14).
        self._side = SideStream(device, len(self._far), priority=LOWEST_PRIORITY)
        self._slots: torch.Tensor | None = None
        self._depth, self._read = _BUFFERS, -1
        # Compiled now: in the middle of a pass the engine would wait for it.
        first = torch.zeros(1, dtype=torch.int32, device=device)
        gather_tokens(*self._far[0], first, *self._kv[:, :1])
        full.token_to_kv_pool = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def begin(self, prefixes: Sequence[int]) -> None:
        """Begin to copy the prefixes of the pass that the backend has planned, ``[B]`` tokens."""
        self._side.join_all()  # copies of a pass that failed
        self._slots, self._read, num_tokens = None, -1, sum(map(int, prefixes))
        if not num_tokens:
            return
        plan = self._full.forward_metadata
        if plan.use_ragged and len(plan.prefill_wrappers) == 1:
            listed = plan.prefill_wrappers[0]._paged_kv_indices_buf[:num_tokens]
            self._slots = self._replace(listed, are_several=sum(map(bool, prefixes)) > 1)
        if self._slots is None:
            self._counters.far_prefix_passes_total += 1
            return
        self._counters.copied_prefix_tokens_total += len(self._slots)
        self._depth = _BUFFERS if len(self._slots) * _BUFFERS <= self._kv.shape[1] else 1
        for layer in range(self._depth):
            self._copy(layer)

    def _replace(self, listed: torch.Tensor, *, are_several: bool) -> torch.Tensor | None:
        """Put places in the staging into a list of slots, and return which slots go there.

        None if they are too many. What several requests share is copied once; finding it waits for
        the GPU, as FlashInfer's planning has just done.
        """
        if are_several:
            slots, places = torch.unique(listed, return_inverse=True)
        else:
            slots, places = listed.clone(), torch.arange(len(listed), device=listed.device)
        if len(slots) > self._kv.shape[1]:
            return None
        listed.copy_(places)
        return slots

    def get_kv_buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V that the attention of `layer` reads; it is queued behind their copy."""
        if self._slots is None:
            found: tuple[torch.Tensor, torch.Tensor] = self._pool.get_kv_buffer(layer)
            return found
        self._side.join(layer)
        self._read = layer
        return self._buffer(layer)

    def attended(self, layer: int) -> None:
        """Copy a later layer over `layer`, behind its attention, which has been queued.

        Raises `ContractError` if SGLang has attended to another pool, where its slots are none of
        the prefix.
        """
        if self._slots is None:
            return
        if self._read != layer:
            raise ContractError(
                f"layer {layer}: SGLang has read K/V of a prefix past the attention backend's "
                "pool; serve with --cache-ranks 0, and report it"
            )
        self._copy(layer + self._depth)
        if layer + 1 == len(self._far):
            self._slots = None

    def _copy(self, layer: int) -> None:
        if layer >= len(self._far):
            return
        assert self._slots is not None
        with self._side.fork(self._slots):
            into = (part[: len(self._slots)] for part in self._buffer(layer))
            gather_tokens(*self._far[layer], self._slots, *into)
            self._side.note_done(layer)

    def _buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._kv.shape[1] // self._depth
        start = layer % self._depth * size
        keys, values = self._kv[:, start : start + size]
        return keys, values
