# SPDX-License-Identifier: Apache-2.0
"""Transport ``local``: the cache rank is an object in the inference rank's own process.

The inference rank must not import the cache rank (it may be on another machine), so the
object is built by dotted path, and what it is asked for is this protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol, Self

import torch

from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings, SelectionSettings

from .engine_program import EngineProgram
from .errors import SettingsError
from .head_shard import HeadShard

_ENGINES = "tandemkv.cache_rank.engine"

PredictQuery = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(layer, hidden [B, hidden_size], positions [B] int64) -> query [B, Hq, D]`` after RoPE."""

Allocate = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
"""``(name, shape, dtype)`` -> zeros on the engine's device, where other processes map them."""

PADDING_ROW = 0
"""Row of requests that only fill up a captured batch."""

WARM_UP_STEPS = 64
"""Steps before a request leaves dense attention in which its resident set is made ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLengths:
    """Up to which length a request is attended to as a whole, and from which it is selected for.

    Between the two nothing that is selected is used yet: the fetch cap bounds how fast a
    resident set can follow, so it starts `WARM_UP_STEPS` early, and is made in each of them,
    whatever `refresh_every` is. No request begins with a cold set: longer prompts are seeded by
    their last queries.
    """

    num_dense: int
    """Longest request that is attended to as a whole."""
    num_cold: int
    """Longest request that is not selected for."""

    @classmethod
    def of(cls, selection: SelectionSettings, num_resident: int) -> Self:
        """Derive both from the settings."""
        if not selection.keeps_dense_while_fits:
            return cls(num_dense=0, num_cold=0)
        fitting = num_resident + selection.num_recent_tokens
        num_dense = max(fitting, selection.dense_tokens or 0)
        return cls(num_dense=num_dense, num_cold=max(fitting, num_dense - WARM_UP_STEPS))


def check_dense(selection: SelectionSettings, placement: Placement) -> None:
    """Refuse to attend as a whole to more than is at hand.

    Raises `SettingsError`, with what to do.
    """
    if not placement.has_far_pool:  # all of it is at hand
        return
    fitting = selection.num_resident + selection.num_recent_tokens
    for name, most in (("dense_tokens", fitting), ("dense_batch_tokens", 0)):
        asked = getattr(selection, name) or 0
        if asked > most:
            raise SettingsError(
                f"{name}={asked}: with transport={placement.link} requests of more than the "
                f"{fitting} tokens that can be resident are not attended to as a whole; add "
                f"--cache-ranks 0, or leave --{name.replace('_', '-')} out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePools:
    """The K/V that the cache rank selects from, and the resident sets that it writes."""

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    """Per layer ``[num_slots, H, D]``, on the cache rank's device; the padding page is slot 0's,
    `num_slots` a multiple of `page_size`. A layer of linear attention has no slots."""
    resident: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Per layer K and V ``[rows, slots, H, D]``, the first R slots of each row being the cache
    rank's (row 0 is padding). They may lie in another GPU's memory. Without a slot they are the
    inference rank's to fill."""
    page_size: int
    """Tokens that lie in consecutive slots."""
    log_weight: torch.Tensor | None = None
    """``[L, rows, H, num_samples]`` float32: with how much weight samples count
    (`tandemkv.kernels.samples`). It may lie in another GPU's memory."""
    is_far: bool = False
    """Whether `resident` and `log_weight` do, or are to be used as if they did. Then the cache rank
    takes its GPU for its own: it chains its kernels (`tandemkv.kernels.streams.let_chain`), and
    scans keep behind the choice before them."""
    shard: HeadShard = field(default_factory=HeadShard)
    """Which KV heads of the inference rank these are, if another cache rank has others."""
    allocate: Allocate | None = None
    """Makes what the engine remembers of each row, so that it outlives its process."""

    @property
    def num_slots(self) -> int:
        """Slots of tokens."""
        return max(len(k) for k in self.k)

    @property
    def num_rows(self) -> int:
        """Rows of the request table."""
        return int(self.resident[0][0].shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionTime:
    """What one layer's selection takes, measured; `batch` requests of `context` tokens.

    `scan_us` is to predict, score, choose and compare with the books; `transfer_us` to copy as
    many rows as one step may.
    """

    scan_us: float
    transfer_us: float
    batch: int
    context: int

    @property
    def total_us(self) -> float:
        """All of it."""
        return self.scan_us + self.transfer_us


class Engine(Protocol):
    """Selects into the resident sets behind the pools. Used from the scheduler thread only.

    What is called from `begin_decode` to the end of the step launches work of fixed shape
    and never waits for the device, so that it can be captured in a CUDA graph.
    """

    program: EngineProgram
    """Which layers select, for whom and when."""

    @property
    def nbytes(self) -> int:
        """Bytes of key index, books, windows of queries, and weights that are to be copied."""

    @property
    def forgets(self) -> bool:
        """Whether the policy remembers of a request what is lost with this process."""

    @property
    def num_lanes(self) -> int:
        """Streams that decode may use at once."""

    def lane_of(self, layer: int) -> int:
        """Which of them everything for `layer` has to be queued in."""

    def begin_extend(
        self,
        rows: Sequence[int],
        prefix_lens: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[torch.Tensor],
    ) -> None:
        """Announce a prefill step; ``tables`` are the slots ``[length]`` of each request.

        What was known of earlier requests in `rows` is forgotten.
        """

    def extend(self, layer: int, slots: torch.Tensor) -> None:
        """Index the keys just written at `slots` ``[n]``."""

    def seed(self, layer: int, request: int, row: int, queries: torch.Tensor) -> None:
        """Fill the resident set of a finished prompt, ``queries [W, Hq, D]`` being its last."""

    def resume(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[torch.Tensor],
        *,
        restored: Sequence[bool],
        reseeded: Sequence[bool],
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """Take up requests that an earlier engine left, from what is in the pools and in the books.

        The key index is made again from the keys. Of `restored` rows the books say what was
        resident: the sets are filled again. Sets of `reseeded` rows get the sink and the latest
        candidates; others have none. ``lengths`` tokens are stored, at ``tables [length]``. `moved`
        is called after each layer's index, which takes a CPU a second, and each `reseeded` row.
        """

    def seed_identity(self, rows: torch.Tensor, tables: torch.Tensor | None) -> None:
        """Make the first R tokens of `rows` ``[n]`` resident, ``tables [n, R]`` their slots.

        Without tables they lie there already.
        """

    def begin_step(self) -> None:
        """Count a decode step, before its work is queued or behind it; not to be captured."""

    def set_num_cold(self, num_cold: int) -> None:
        """Say which is the longest request that steps from now on do not select for.

        By the settings, until it is called. Costs nothing where that is known. Not to be captured:
        a captured `begin_decode` goes by what was said last.
        """

    def begin_decode(
        self, rows: torch.Tensor, lengths: torch.Tensor, req_to_token: torch.Tensor,
        *, selects: bool = True, slow: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Load the requests of a decode step into the fixed buffers.

        Needed where the step indexes, selects or attends (`attend`, `attend_selected`). A graph
        that captures it reads rows, lengths and slots anew in each step.

        ``rows [B]``, ``lengths [B]`` (after the step) and ``req_to_token [rows, max_context]``
        int32, the slot of each position, are on the cache rank's device. Whether the step `selects`
        is counted. With `slow_steps`, ``slow [B]`` bool, on the host, are the requests that are
        selected for.
        """

    def end_step(self) -> None:
        """Note that a step's last layer is queued, and all of the step's lanes are joined."""

    def append(self, layer: int, batch_size: int) -> None:
        """Index the key that the step wrote in `layer`."""

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attend to all tokens of the step's requests in `layer`, those of the step included.

        ``query [B, Hq, D]``; returns the same shape and dtype. With `EngineProgram.slow_steps` the
        requests of a sparse layer that are not slow do not attend, and get 0. For a forward pass
        that is on another GPU or host than the K/V.
        """

    def attend_selected(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Let a policy that `attends` do so with the layer's own query ``[B, Hq, D]``.

        Returns output and, last, natural log-sum-exp, ``[B, Hq, D + 1]`` float32, over some of the
        tokens between sink and recent ones; ``-inf`` for requests that are attended to as a whole.
        """

    def choose_ahead(self, layer: int, hidden: torch.Tensor) -> None:
        """`choose` with the residual stream ``[B, hidden_size]`` of an earlier layer."""

    def choose_late(self, layer: int, hidden: torch.Tensor) -> None:
        """`choose` for a late layer and the next step, with the stream at its own entry.

        ``hidden [B, hidden_size]`` is this step's. Late layers are chosen for in their order, in
        lanes that are behind this step's other selections; `fetch` follows as usual.
        """

    def choose(self, layer: int, query: torch.Tensor) -> None:
        """Scan for `layer` with a query ``[B, Hq, D]``, and keep what is best for `fetch`.

        The query is observed as well.
        """

    def fetch(self, layer: int, batch_size: int) -> None:
        """Bring to `layer` what its source, maybe itself, has chosen in this step."""

    def observe(self, layer: int, query: torch.Tensor) -> None:
        """Take note of a step's query ``[B, Hq, D]`` in `layer`, where nothing is selected."""

    def resident_positions(self, layer: int) -> torch.Tensor | None:
        """Return the position in each resident slot of `layer`, ``[rows, H, R]`` int32.

        -1 where empty; None for a layer that nothing is selected for.
        """

    def counters(self) -> dict[str, float]:
        """Totals since the start; waits for the device."""

    def last_counters(self) -> dict[str, float]:
        """Totals, on a GPU of about a step ago, without waiting; any thread may ask."""


def create_engine(
    *,
    model: ModelSpec,
    settings: RankSettings,
    pools: EnginePools,
    max_batch: int,
    predict_query: PredictQuery,
    model_dir: Path | None = None,
) -> Engine:
    """Build the engine in this process.

    `model_dir` tells the rotary embedding of the model, for policies that undo it. Raises
    `SettingsError` or `PolicyError` if the settings cannot be served in this process.
    """
    made: Engine = import_module(f"{_ENGINES}.factory").create(
        model=model,
        settings=settings,
        pools=pools,
        max_batch=max_batch,
        predict_query=predict_query,
        model_dir=model_dir,
    )
    return made


def measure_selection(
    *,
    model: ModelSpec,
    settings: RankSettings,
    num_slots: int,
    page_size: int,
    max_batch: int,
    device: torch.device,
    predict_query: PredictQuery,
    model_dir: Path | None = None,
) -> SelectionTime | None:
    """Time one layer's selection at the most requests and tokens that `num_slots` slots hold.

    Everything is done on a small cache rank of its own, with random keys: none of the arguments'
    memory is touched. `predict_query` is that of one layer, whichever it is asked for. Returns None
    if nothing is ever selected: by the policy, or because every request that fits is attended to as
    a whole. Raises `torch.OutOfMemoryError` if there is no memory left for it.
    """
    found: SelectionTime | None = import_module(f"{_ENGINES}.measure").measure(
        model=model,
        settings=settings,
        num_slots=num_slots,
        page_size=page_size,
        max_batch=max_batch,
        device=device,
        predict_query=predict_query,
        model_dir=model_dir,
    )
    return found
