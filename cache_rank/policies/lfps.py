# SPDX-License-Identifier: Apache-2.0
"""LFPS: candidates from past attention, exact scores for these alone, attention on this CPU."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.cache_rank.protocol.threads import given_threads

from .attending import Attended, AttendingPolicy, AttendInput
from .base import (
    Owner,
    PolicyCapabilities,
    PolicyContext,
    PolicyError,
    PolicyOptions,
    SeedInput,
    check_seed_queries,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]
BYPASSES = {"sink_and_mean": 0, "sink": 1, "mean": 2}
_BLOCK = 64
_ROWS_AT_ONCE = 8
"""Prompt rows whose logits are held together."""
_MOST_THREADS = 8
_WORTH_THREADS = 8
"""Heads in a step from which on threads gain more than they cost: one takes 0.03 ms at 32K keys."""


class LfpsOptions(PolicyOptions):
    """Parameters by their names in the paper."""

    rows: int = Field(
        default=32, ge=1, le=1024, description="s: prompt queries that fill the tables, Eq. 4."
    )
    decay: float = Field(
        default=0.95, ge=0.0, lt=1.0, description="r: decay of the tables, Eq. 10."
    )
    sparsity: float = Field(
        default=0.85, gt=0.0, le=1.0, description="epsilon: sink share of a bypassed head."
    )
    threshold: float = Field(
        default=0.2, gt=0.0, le=64.0, description="a of the candidates' threshold, Eq. 8."
    )
    bypass: Literal["sink_and_mean", "sink", "mean"] = Field(
        default="sink_and_mean", description="What a bypassed head returns."
    )


class LfpsPolicy(AttendingPolicy):
    """Keep a vertical and a slash table of past weights, and score what they point at.

    Prefill: the last s prompt queries fill the tables (Eq. 4); mean key, mean value and
    ``sigma^2 / |q|^2`` are kept. Decode, per head: (1) if the share of the sink, estimated by
    Eq. 5-6 in the log domain, exceeds epsilon, the head is bypassed; (2) candidates are the
    entries above ``a * mean / kurtosis`` in either table (Eq. 7-8); (3) their neighbours at
    {-1, 0, 1, 2} that are above a table's mean (Eq. 9); (4) exact dot products with these, top-k,
    weighted sum of the values, update of the tables (Eq. 10).

    No step reads all keys or a whole table: `tandemkv.kernels.numba_ops.lfps_tables` says how.
    Work is spread over requests and heads, as many threads as `policy_threads` says. K and V must
    be float32 or bfloat16.

    Notes
    -----
    Where the paper leaves a choice, or this system has to differ:

    - Besides the sink, the latest `num_recent_tokens` are attended to on the inference rank, and
      merged by log-sum-exp. Tables are about the rest, and each prompt row of Eq. 4 about the
      positions that would have been candidates in its step.
    - A KV head has one pair of tables and one candidate set; weights are means over the
      group's query heads that are not bypassed. The paper speaks of heads only.
    - Fewer rows than s fill the tables where a prompt's last chunk has fewer tokens that are new:
      a prefix that SGLang's cache has, or a short turn of a conversation, brings no queries.
    - The slash table is kept by distance, so that a step reads the score of a position's own
      distance. As printed, Eq. 7 reads the table before Eq. 10 shifts it: one position off.
    - Bypass: the local part (sink, recent) is exact; the rest returns the mean value, weighted
      with ``w_global``: "sink plus mean of the rest", with the least error in Figure 2c. Nothing
      of the rest (``bypass=sink``: what is local alone) and, as Algorithm 1 prints, the mean value
      alone (``mean``) are options. A KV head is skipped (and its tables left alone) if all its
      query heads are bypassed.
    - ``w_sink`` covers all `num_sink_tokens`. Mean key and value go on to include the tokens that
      leave the ring; sigma stays that of the last prompt row.
    - A query head whose weights have no finite sum, as with a query of NaN, returns nothing of the
      rest, and tables learn nothing from it: other heads and requests go on.
    - If all entries of a table are equal their kurtosis is taken as 1/n, its least value. If there
      is no candidate at all, sink and recent tokens are all that the step attends to.
    - While the budget covers all candidates, all are attended to and nothing is bypassed. So it
      is, with the best `budget_tokens` of all, in the first step of a row without tables (it was
      dense when its prompt ended); that step fills them, Eq. 4 with s = 1.

    References
    ----------
    Yao and Wang, *Learn from the Past: Fast Sparse Indexing for Large Language Model Decoding*.
    """

    capabilities: ClassVar[PolicyCapabilities] = PolicyCapabilities(
        timing=Timing.SAME_STEP_ATTENTION,
        devices=("cpu",),
        kv_dtypes=("float32", "bfloat16"),
        per_head=True,
    )
    options_model: ClassVar[type[PolicyOptions]] = LfpsOptions
    options: LfpsOptions

    @classmethod
    def check_settings(cls, selection: SelectionSettings) -> None:
        """See `Policy.check_settings`."""
        options = cls.options_model.model_validate(selection.options)
        assert isinstance(options, LfpsOptions)
        check_seed_queries("lfps.rows", options.rows, selection)
        if selection.budget_tokens < 1:
            raise PolicyError(
                "budget_tokens=0: policy=lfps would choose nothing beside the sink and the recent "
                "tokens; raise --budget-tokens, or use --policy streaming, which attends to these "
                "alone"
            )

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._step = _load_kernel()
        self._states: dict[Owner, dict[int, LfpsState]] = {}
        self._num_threads = policy_threads()
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="lfps")
        self._warm_up()

    def observe_stored(self, request: SeedInput) -> None:
        """See `AttendingPolicy.observe_stored`."""
        state = LfpsState(self.context.model)
        state.start(
            request,
            num_rows=self.options.rows,
            decay=self.options.decay,
            num_recent=self.context.selection.num_recent_tokens,
        )
        self._states.setdefault(request.owner, {})[request.layer] = state

    def attend(self, request: AttendInput) -> Attended:
        """See `AttendingPolicy.attend`."""
        model = self.context.model
        num_requests = len(request.owners)
        merged = np.zeros((num_requests, model.num_qo_heads, model.head_dim + 1), np.float32)
        merged[..., -1] = -np.inf
        counts = np.zeros((2, num_requests, model.num_kv_heads), np.int64)
        k, v = (_as_array(pool) for pool in (request.stored.k, request.stored.v))
        query = np.ascontiguousarray(request.query.float().numpy())
        slots = request.stored.slots.numpy()
        jobs: list[tuple[Any, ...]] = []
        heads = model.num_kv_heads
        threads = self._num_threads if num_requests * heads >= _WORTH_THREADS else 1
        parts = min(heads, -(-threads // num_requests))  # as many as keep all threads busy
        edges = [heads * i // parts for i in range(parts + 1)]
        ranges = zip(
            request.lo.tolist(), request.hi.tolist(), request.lengths.tolist(), strict=True
        )
        for i, (lo, hi, length) in enumerate(ranges):
            if hi <= lo:
                continue
            layers = self._states.setdefault(request.owners[i], {})
            state = layers.get(request.layer)
            if state is None:
                state = layers[request.layer] = LfpsState(model)
            state.reserve(hi - lo)
            where = (lo, hi - lo, length, state.arrays)
            for first, last in pairwise(edges):
                results = (merged[i], counts[0, i], counts[1, i])
                jobs.append(
                    (query[i], k, v, slots[i], *where, request.budget, first, last, results)
                )
        if threads == 1 or len(jobs) < 2:
            for job in jobs:
                self._run_one(job)
        else:
            list(self._pool.map(self._run_one, jobs))
        num_attended, num_scored = (int(count.sum()) for count in counts)
        return Attended(torch.from_numpy(merged), num_scored, num_attended)

    def release(self, owner: Owner) -> None:
        """See `Policy.release`."""
        self._states.pop(owner, None)

    def _run_one(self, job: tuple[Any, ...]) -> None:
        query, k, v, slots, lo, n, length, arrays, budget, first, last, results = job
        options = self.options
        self._step(
            query, k, v, slots, lo, n, length, arrays,
            np.float32(self.context.model.scale), budget, options.threshold,
            options.decay, options.sparsity, BYPASSES[options.bypass],
            first, last, *results,
        )  # fmt: skip

    def _warm_up(self) -> None:
        """Compile before a request waits for it."""
        model = self.context.model
        if model.dtype == "float16":
            return  # an engine does not get here (`check_kv_dtype`), and KV of it are not read
        heads = model.num_kv_heads
        # Numba compiles anew for another layout.
        whole = 2 * heads if self.context.has_strided_pools else heads
        pool = torch.zeros(8, whole, model.head_dim, dtype=getattr(torch, model.dtype))[:, :heads]
        state = LfpsState(model)
        state.reserve(4)
        arrays = np.zeros((2, model.num_kv_heads), np.int64)
        out = np.zeros((model.num_qo_heads, model.head_dim + 1), np.float32)
        query, where = np.zeros(out[:, :-1].shape, np.float32), np.arange(8, dtype=np.int32)
        keys, results = _as_array(pool), (out, *arrays)
        self._run_one((query, keys, keys, where, 1, 4, 8, state.arrays, 4, 0, 1, results))


def _as_array(pool: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a pool as NumPy sees it; bfloat16 as uint16.

    Raises `PolicyError` if its device or dtype is none that the kernel reads.
    """
    if pool.device.type != "cpu":
        raise PolicyError(f"policy=lfps attends on a CPU, the KV is on {pool.device}")
    if pool.dtype == torch.bfloat16:
        return pool.view(torch.uint16).numpy()
    if pool.dtype != torch.float32:
        raise PolicyError(
            f"policy=lfps reads KV in float32 or bfloat16, not {pool.dtype}; give --dtype float32"
        )
    return pool.numpy()


def _load_kernel() -> Callable[..., None]:
    try:
        from tandemkv.kernels.numba_ops.lfps import lfps_heads
    except ImportError as error:
        raise PolicyError(f"policy=lfps cannot be used: {error}") from error
    return lfps_heads


def policy_threads() -> int:
    """Return ``OMP_NUM_THREADS``, or without it half of this process's cores, eight at most.

    SGLang's processes and what polls for a GPU want cores as well. Raises `SettingsError` if the
    variable is no positive number.
    """
    return given_threads() or max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2))


class LfpsState:
    """What is remembered of one request in one layer.

    Arrays that `tandemkv.kernels.numba_ops.lfps.lfps_heads` reads and writes.
    """

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
