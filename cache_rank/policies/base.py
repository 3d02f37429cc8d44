# SPDX-License-Identifier: Apache-2.0
"""The seam between the engine and a method of selection.

A policy sees queries and a scorer, and answers with token positions. It owns what it
remembers about a request, keyed by (row, generation), and never touches pools or links.
All calls come from one thread.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch

from tandemkv.cache_rank.protocol.engine import Allocate
from tandemkv.cache_rank.protocol.messages import PolicyTraits, RefreshRule, Timing
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.settings.declared import DeclaredPolicy
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.kernels.position_pooling import pool_positions
from tandemkv.kernels.topk import topk_positions

from .checkpoint import Checkpoint as Checkpoint
from .options import PolicyError as PolicyError
from .options import PolicyOptions as PolicyOptions
from .options import read_options

_CPU = torch.device("cpu")
Owner = tuple[int, int]
"""A request while it occupies a row: (row, generation)."""

Scorer = Callable[[torch.Tensor], torch.Tensor]
"""Scores of the candidates under queries ``[S, Hq, D]``: ``[S, H, width]`` float32, ``-inf``
where a position is no candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCapabilities:
    """What a policy declares about itself."""

    timing: Timing
    """When a selection is made, and with what."""
    all_exact: bool = False
    """Every layer takes the exact step, nothing is selected."""
    wants_query_window: bool = False
    """`Policy.observe` is called with the queries of every step, not only of those in which a
    selection is made (next-step policies only)."""
    refresh: RefreshRule = RefreshRule.NEVER
    """Which steps of a sparse row are slow (`Timing.EXACT_STEP` only)."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Where it can run."""
    kv_dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """Of the model's dtypes, in which K and V are stored, those that it can read."""
    default_samples: int = 0
    """Samples that are attended to besides, if nothing else is asked for and K is not less."""
    prediction: Literal["ridge", "mean"] | None = None
    """A `windowed.WindowedPolicy` whose `predict` is one of the kernel
    `tandemkv.kernels.query_window.push_and_predict`, which then takes the place of its methods."""
    index: Literal["keys", "page_bounds"] = "keys"
    """What its `select` reads: keys, or their bounds by page as well (`SelectionInput.pages`)."""
    calibration: Literal["kascade", "sync_kv"] | None = None
    """What of a calibration it is built with: `PolicyContext.share` or `PolicyContext.clusters`."""
    graph_safe: bool = False
    """A promise of a policy whose own methods are called in decode steps (`composition`): they
    launch the same work in each step, of one shape whatever the lengths, do not wait for the
    device, and keep what they remember in tensors by row. A GPU captures a step of theirs once and
    replays it; steps of others it does not capture (`composition.is_captured`)."""
    per_head: bool = False
    """A promise: what is selected, or attended to, for a KV head depends on nothing of other KV
    heads. Several cache ranks have a part of the heads each, and other policies are refused
    there."""

    @property
    def attends(self) -> bool:
        """Whether it is an `attending.AttendingPolicy`."""
        return self.timing is Timing.SAME_STEP_ATTENTION

    @property
    def selects(self) -> bool:
        """Whether anything is selected in decode."""
        return self.timing is not Timing.NONE

    @property
    def has_slow_steps(self) -> bool:
        """Whether it selects in slow steps, in which a row attends to everything."""
        return self.timing is Timing.EXACT_STEP

    def declare(self, **options: Any) -> DeclaredPolicy:
        """Return what settings and the inference rank know of a policy.

        `PolicyOptions.declare` enters here what the policy's options say; see `DeclaredPolicy`.
        """
        names = {field.name for field in fields(self)} & DeclaredPolicy.model_fields.keys()
        return DeclaredPolicy(**options, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary embedding of a model, as a rotation of the two halves of a head."""

    inv_freq: torch.Tensor
    """``[head_dim / 2]``, float32; 0 where nothing is turned."""
    scaling: float = 1.0
    """Factor of what is turned."""
    order: torch.Tensor | None = None
    """``[head_dim]``, int64: where the elements of a head lie before they are put in the order in
    which its halves are turned. None if they are in that order."""

    def to_halves(self, queries: torch.Tensor) -> torch.Tensor:
        """Return ``[..., head_dim]`` in the order in which halves are turned."""
        return queries if self.order is None else queries[..., self.order.to(queries.device)]

    def from_halves(self, queries: torch.Tensor) -> torch.Tensor:
        """Return ``[..., head_dim]`` in the model's order."""
        if self.order is None:
            return queries
        return queries[..., self.order.argsort().to(queries.device)]


@dataclass(frozen=True, slots=True)
class LayerShare:
    """Which layer's selection each layer uses, and which of its heads."""

    sources: tuple[int, ...]
    """For each layer the one that selects, itself for an anchor."""
    head_maps: tuple[tuple[int, ...], ...]
    """``[num_layers][num_kv_heads]``: the head of the source that each head follows."""


@dataclass(frozen=True, slots=True)
class HeadClusters:
    """Clusters of the KV heads of each layer."""

    clusters: tuple[tuple[int, ...], ...]
    """``[num_layers][num_kv_heads]``: the cluster of each head."""
    representatives: tuple[tuple[int, ...], ...]
    """``[num_layers][num_clusters]``: the representative head of each cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """What a policy is built from.

    `device` is where queries and scores are. `checkpoint` and `rotary` are None if no model
    directory is at hand; `share` and `clusters` are what the calibration says, None where it is not
    needed. Weights that decode steps use are to be on `device` before the first of them.
    `has_strided_pools`: `StoredKV` are views of pools that have other KV heads as well.
    """

    model: ModelSpec
    selection: SelectionSettings
    device: torch.device = _CPU
    checkpoint: Checkpoint | None = None
    rotary: Rotary | None = None
    share: LayerShare | None = None
    clusters: HeadClusters | None = None
    has_strided_pools: bool = False


@dataclass(frozen=True, slots=True)
class StoredKV:
    """The K/V of S requests in one layer, for policies that read more than scores.

    ``k`` and ``v`` are pools ``[num_slots, num_kv_heads, head_dim]``; ``slots`` ``[S, width]``
    int32 says where a position is stored. Slots of a request may change (prefix sharing),
    what is stored at a position does not: remember by position, never by slot.
    """

    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class PageBounds:
    """Bounds of the keys in one layer, by rows of requests and pages of positions."""

    bounds: torch.Tensor
    """``[2, num_rows, max_pages, num_kv_heads, head_dim]``, not a copy: in the row of a request
    (`SelectionInput.rows`) the least and the largest of each key component among the candidates in
    a page. Undefined for pages without any, and for other rows."""
    page_tokens: int
    """Page p has the positions from ``p * page_tokens`` on."""
    num_pages: int
    """No candidate of any request is in page `num_pages` or behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionInput:
    """One selection in one layer, for S requests."""

    layer: int
    """The layer that will use it."""
    owners: Sequence[Owner]
    """The requests; none on a GPU that captures steps, where `rows` says who they are."""
    rows: torch.Tensor
    """``[S]`` int64: row of each request. Where steps are captured rows whose candidates end where
    they begin are among them (padding, dense requests)."""
    query: torch.Tensor
    """``[S, num_qo_heads, head_dim]``, after RoPE: the predicted query of the layer
    (`Timing.SAME_STEP_HIDDEN`), else its true query. If only some KV heads are slow
    (`PolicyTraits.slow_heads`), of their groups only, and `score` is about them."""
    positions: torch.Tensor
    use_positions: torch.Tensor
    """``[S]`` int64: position of `query`, and of the query that the selection is for."""
    score: Scorer
    """Scores of the candidates; sink and recent tokens are none."""
    budget: int
    """K, positions per KV head."""
    lo: torch.Tensor
    hi: torch.Tensor
    """``[S]`` int64: the candidates are the positions ``[lo, hi)``."""
    stored: StoredKV
    """What `score` reads, for policies with an index of their own."""
    pages: PageBounds | None = None
    """With `PolicyCapabilities.index` ``page_bounds``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedInput:
    """The end of a prompt in one layer, for which the resident set is to be filled."""

    layer: int
    owner: Owner
    queries: torch.Tensor
    positions: torch.Tensor
    """``[W, num_qo_heads, head_dim]`` and ``[W]`` int64: the last prompt queries."""
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """``score(queries, positions)``: ``[num_kv_heads, width]`` float32, see
    `tandemkv.kernels.score.score_window`; ``-inf`` on the sink."""
    lo: int
    hi: int
    """The candidates are the positions ``[lo, hi)``; ``width`` is `hi`."""
    stored: StoredKV
    """What `score` reads, with ``slots`` ``[1, length]``."""
    budget: int
    """K; more may be resident."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Logical positions ``[S, num_kv_heads, budget]`` int32, best first, padded with ``-1``."""

    positions: torch.Tensor

    def check(self, shape: tuple[int, int, int]) -> None:
        """Refuse another shape or dtype: policies may be the user's.

        Raises `PolicyError` if the positions are not ``[S, H, K]`` int32.
        """
        if self.positions.dtype != torch.int32 or tuple(self.positions.shape) != shape:
            raise PolicyError(
                f"selection {self.positions.dtype}{tuple(self.positions.shape)} must be "
                f"int32{shape}: [requests, KV heads, budget]"
            )


class Policy(ABC):
    """A method of selection.

    Parameters
    ----------
    context : PolicyContext
        Model and settings; a user's own class is built with the same argument.
    """

    capabilities: ClassVar[PolicyCapabilities]
    options_model: ClassVar[type[PolicyOptions]] = PolicyOptions
    """Model of the options that this policy alone reads; none by default."""
    options: PolicyOptions
    """An `options_model` of what the settings say. A class with a model of its own narrows it."""
    pools_positions: ClassVar[bool] = False
    """Whether it ranks tokens by `pooled` scores; else ``pool_before`` and ``pool_after`` are
    refused. A class with a `select` of its own says so itself."""

    def __init__(self, context: PolicyContext) -> None:
        self.context = context
        selection = context.selection
        self.options = read_options(self.options_model, selection.policy, selection.options)
        self.check_settings(selection)

    @classmethod
    def check_settings(cls, selection: SelectionSettings) -> None:
        """Refuse settings that it cannot be built with; `serve` asks before it starts anything.

        Raises `PolicyError`, saying what to do.
        """
        del selection

    @property
    def traits(self) -> PolicyTraits:
        """What the transfers of a step depend on, besides the timing."""
        share = self.context.share
        return PolicyTraits(layer_sources=share.sources if share is not None else ())

    @property
    def page_tokens(self) -> int:
        """Positions of a page whose bounds are kept (`PolicyCapabilities.index`)."""
        return 16

    def make_rows(self, allocate: Allocate, num_rows: int) -> None:
        """Make what is remembered of the request in each of `num_rows` rows.

        Called once, before anything else. Tensors of `allocate` outlive the engine's process where
        that is promised, and are found again under their names by the next one; new ones are zeros.
        Two steps may be done twice, so writing must be such that the second time changes nothing.
        What a policy remembers elsewhere is lost with the process: it goes on as with a request
        that it sees for the first time.
        """
        del allocate, num_rows

    def seed_scores(self, request: SeedInput) -> torch.Tensor:
        """Score a prompt's tokens ``[H, width]`` float32 for the first resident set."""
        return self.pooled(request.score(request.queries, request.positions))

    def pooled(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores ``[H, width]`` or ``[S, H, width]`` pooled as the settings say."""
        whole = scores if scores.dim() == 3 else scores[None]
        return pool_positions(whole, *self.context.selection.pooled_positions).view(scores.shape)

    def select(self, request: SelectionInput) -> Selection:
        """Choose the positions of one layer. Pure towards everything but the policy's own state.

        Raises `PolicyError` for a policy that selects nothing.
        """
        raise PolicyError(f"{type(self).__name__} selects nothing (layer={request.layer})")

    def observe_prompt(
        self, layer: int, owner: Owner, queries: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Take note of the last prompt queries ``[W, Hq, D]`` at `positions` ``[W]``."""
        del layer, owner, queries, positions

    def observe(
        self, layer: int, owners: Sequence[Owner], queries: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Take note of a step's queries ``[B, Hq, D]``, before `select`.

        Called only with `PolicyCapabilities.wants_query_window`.
        """
        del layer, owners, queries, positions

    def release(self, owner: Owner) -> None:
        """Forget a request."""
        del owner


class ScoringPolicy(Policy):
    """A policy that scores every candidate with one query per head, and takes the best.

    With ``pool_before`` and ``pool_after`` a candidate counts at least as much as its neighbours.
    """

    pools_positions: ClassVar[bool] = True

    def query_for(self, request: SelectionInput) -> torch.Tensor:
        """Return the query ``[S, Hq, D]`` to score with; the given one by default."""
        return request.query

    def num_wanted(self, lengths: torch.Tensor) -> torch.Tensor | None:
        """Return how many of the K best requests of `lengths` ``[S]`` tokens get; None: all.

        ``[S]`` integers, by tensor operations alone: a GPU captures them.
        """
        del lengths
        return None

    def select(self, request: SelectionInput) -> Selection:
        """See `Policy.select`."""
        scores = self.pooled(request.score(self.query_for(request)))
        chosen = topk_positions(scores, request.budget)
        wanted = self.num_wanted(request.positions + 1)
        return Selection(chosen if wanted is None else keep_first(chosen, wanted))


def keep_first(positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Replace all but the first `wanted` ``[S]`` of `positions` ``[S, H, K]`` by ``-1``."""
    ranks = torch.arange(positions.shape[-1], device=positions.device)
    return positions.masked_fill((ranks >= wanted[:, None])[:, None], -1)


def check_seed_queries(name: str, wanted: int, selection: SelectionSettings) -> None:
    """Refuse an option of more prompt queries than are handed over.

    Raises `PolicyError`.
    """
    if wanted > selection.seed_window:
        raise PolicyError(
            f"{name}={wanted}: the last {selection.seed_window} queries of a prompt are handed "
            "over; take as many at most, or raise --seed-window"
        )
