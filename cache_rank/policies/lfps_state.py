# SPDX-License-Identifier: Apache-2.0
"""What LFPS remembers of one request in one layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec

from .base import SeedInput

Array = np.ndarray[Any, Any]

_BLOCK = 64
_ROWS_AT_ONCE = 8
"""Prompt rows whose logits are held together."""


class LfpsState:
    """The arrays that `tandemkv.kernels.numba_ops.lfps.lfps_heads` reads and writes."""

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        heads, dim = model.num_kv_heads, model.head_dim
        self._tables: Array = np.zeros((2, heads, 0), np.float32)
        self._peaks: Array = np.zeros((2, heads, 0), np.float32)
        self._sums: Array = np.zeros((2, heads, 4))
        self._unit: Array = np.zeros(heads)
        self._sigma2: Array = np.zeros(model.num_qo_heads)
        self._key_sum: Array = np.zeros((heads, dim))
        self._value_sum: Array = np.zeros((heads, dim))
        self._counted: Array = np.zeros(heads, np.int64)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The state as the kernel takes it; views, not copies."""
        return (
            self._tables,
            self._peaks,
            self._sums,
            self._unit,
            self._sigma2,
            self._key_sum,
            self._value_sum,
            self._counted,
        )

    def reserve(self, n: int) -> None:
        """Make room for `n` candidates; new entries are zero."""
        capacity = self._tables.shape[-1]
        if n <= capacity:
            return
        blocks = -(-max(n + _BLOCK, capacity + capacity // 4) // _BLOCK)
        grow = (0, 0), (0, 0), (0, blocks * _BLOCK - capacity)
        self._tables = np.pad(self._tables, grow)
        self._peaks = np.pad(self._peaks, (*grow[:2], (0, blocks - self._peaks.shape[-1])))

    def start(self, request: SeedInput, *, num_rows: int, decay: float, num_recent: int) -> None:
        """Fill the tables from the last prompt queries (Eq. 4), and the three priors.

        Parameters
        ----------
        request : SeedInput
            The prompt's end; positions ``[lo, hi)`` are candidates in the first decode step.
        num_rows : int
            s; fewer are used if fewer were sent or have candidates.
        decay : float
            r.
        num_recent : int
            Tokens that are no candidates, as of each row.
        """
        model, lo = self._model, request.lo
        n = request.hi - lo
        if n <= 0:
            return
        self.reserve(n)
        slots = request.stored.slots[0].long()
        # Candidates of each row, as if it had been decoded.
        visible = (request.positions + 1 - num_recent - lo).tolist()
        rows = [i for i in range(len(visible)) if visible[i] > 0][-num_rows:]
        for head in range(model.num_kv_heads):
            keys = request.stored.k[slots[lo : request.hi], head].float()
            self._key_sum[head] = keys.sum(0, dtype=torch.float64).numpy()
            values = request.stored.v[slots[lo : request.hi], head].float()
            self._value_sum[head] = values.sum(0, dtype=torch.float64).numpy()
            self._counted[head] = n
            if not rows:
                continue
            group = slice(head * model.gqa_group_size, (head + 1) * model.gqa_group_size)
            queries = request.queries[rows, group].float()
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                part = slice(start, start + _ROWS_AT_ONCE)
                self._add_rows(queries[part], keys, [visible[i] for i in rows[part]], head)
            self._set_variance(queries[-1], keys[: visible[rows[-1]]], head)
            self._tables[:, head] *= 0.5 / (len(rows) * (1.0 - decay))
            self._refresh(head, n)

    def _add_rows(
        self, queries: torch.Tensor, keys: torch.Tensor, visible: list[int], head: int
    ) -> None:
        """Add the mean weights of each of `queries` ``[s, G, D]`` over the keys it sees."""
        logits = (queries.flatten(0, 1) @ keys.T).view(*queries.shape[:2], -1) * self._model.scale
        for row, end in zip(logits, visible, strict=True):
            row[:, end:] = float("-inf")
        weights = logits.softmax(-1).mean(1).numpy()  # [s, n]
        self._tables[0, head, : len(keys)] += weights.sum(0)
        for row, end in zip(weights, visible, strict=True):
            self._tables[1, head, :end] += row[:end][::-1]

    def _set_variance(self, query: torch.Tensor, keys: torch.Tensor, head: int) -> None:
        logits = (query @ keys.T * self._model.scale).double()
        ratio = logits.var(-1, correction=0) / query.double().square().sum(-1)
        first = head * self._model.gqa_group_size
        self._sigma2[first : first + len(ratio)] = ratio.nan_to_num(0.0).numpy()

    def _refresh(self, head: int, n: int) -> None:
        from tandemkv.kernels.numba_ops.lfps_tables import refresh

        self._unit[head] = 1.0
        refresh(self._tables, self._peaks, self._sums, self._unit, head, n)
