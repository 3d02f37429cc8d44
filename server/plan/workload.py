# SPDX-License-Identifier: Apache-2.0
"""What is to be served: context, concurrency, and what the resident set may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.models.index_channels import num_index_channels
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

from .pages import page_tokens
from .shape import ModelShape

DEFAULT_CHUNK_TOKENS = 8192
"""Prompt tokens of a pass, where nothing else is asked for."""
CALIBRATED_ANCHORS = 5
"""Anchor layers of a calibration where nothing else is asked for, and of those that are shipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A load that a placement is planned for. Token counts are per KV head.

    `capacity_tokens` is the KV of all requests together; without it,
    ``context_tokens * concurrency``. `exact_layers` attend to everything. Of the others
    those are scanned that follow no earlier one of `anchors` (`()`: as many as calibrations have;
    None: nobody follows); with `all_exact` none is. `waits` says that a scanned layer selects with
    its own query, which nothing hides. Between two GPUs `num_late` first layers are selected for in
    the step before, and the copy of W_q has `predictor_dtype`, ``native`` or ``int8``. In the
    inference rank's own GPU `own_predictor_dtype` is ``native``, the model's W_q, or an ``int8``
    copy. An index has `index_channels` of each key, all by default; `is_fitted`: projections of a
    file are held in place of either. `predicts` says that queries are predicted, with which a
    quantised W_q is held once more. `seed_window` is the number of last queries of a prompt that
    its set is chosen with. `max_context` is the longest request that is taken; without it,
    `context_tokens`.
    """

    context_tokens: int
    concurrency: int
    num_resident: int
    num_recent_tokens: int = 64
    num_samples: int = 0
    fetch_cap_tokens: int = 64
    exact_layers: tuple[int, ...] = (0, 1)
    selects: bool = True
    index_dtype: Literal["native", "int8", "int4"] = "int8"
    index_channels: int | None = None
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    capacity_tokens: int | None = None
    anchors: tuple[int, ...] | None = None
    waits: bool = False
    num_late: int = 0
    predictor_dtype: str = "int8"
    own_predictor_dtype: str = "native"
    is_fitted: bool = False
    predicts: bool = True
    seed_window: int = 64
    max_context: int | None = None
    all_exact: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        for name in ("context_tokens", "concurrency", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)} must be at least 1")
        if self.capacity_tokens is not None and self.capacity_tokens < self.context_tokens:
            raise SettingsError(
                f"capacity_tokens={self.capacity_tokens} cannot hold one request of "
                f"{self.context_tokens} tokens; raise --cache-tokens or lower --context"
            )

    @classmethod
    def from_selection(
        cls,
        selection: SelectionSettings,
        *,
        context_tokens: int,
        concurrency: int,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        capacity_tokens: int | None = None,
        anchors: tuple[int, ...] | None = None,
        max_context: int | None = None,
    ) -> Self:
        """Take what concerns the resident set from `selection`; `anchors` as a calibration has."""
        from tandemkv.cache_rank.policies.registry import find_policy

        capabilities = find_policy(selection.policy).capabilities
        is_shared = capabilities.calibration == "kascade" or selection.share_layers
        timing = capabilities.timing
        predicts = timing is Timing.SAME_STEP_HIDDEN
        waits = predicts and not selection.declared.layers_ahead
        return cls(
            context_tokens=context_tokens,
            concurrency=concurrency,
            num_resident=selection.num_resident,
            num_recent_tokens=selection.num_recent_tokens,
            num_samples=selection.num_samples,
            fetch_cap_tokens=selection.fetch_cap_tokens,
            selects=selection.num_resident > selection.num_sink_tokens
            and not capabilities.all_exact,
            all_exact=capabilities.all_exact,
            index_dtype=selection.index_dtype,
            index_channels=num_index_channels(selection),
            chunk_tokens=chunk_tokens,
            capacity_tokens=capacity_tokens,
            anchors=(anchors or selection.anchors) if is_shared else None,
            exact_layers=selection.exact_layer_ids,
            waits=waits or timing is Timing.SAME_STEP_QUERY,
            num_late=selection.late_between_gpus,
            seed_window=selection.seed_window,
            max_context=max_context,
            predictor_dtype=selection.predictor_dtype_of(on_second_gpu=True),
            own_predictor_dtype=selection.predictor_dtype_of(on_second_gpu=False),
            is_fitted=bool(selection.declared.predictor),
            predicts=predicts,
        )

    @property
    def total_tokens(self) -> int:
        """Tokens whose KV is kept."""
        return self.capacity_tokens or self.context_tokens * self.concurrency

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request that there is room for."""
        return min(self.max_context or self.context_tokens, self.total_tokens)

    def num_scanned(self, num_layers: int, without: Sequence[int] = ()) -> int:
        """Layers whose keys are scanned, of `num_layers`; those `without` a selection are not."""
        others = {*self.exact_layers, *without}
        sparse = max(0, num_layers - len(others))
        if self.anchors is None:
            return sparse
        if not self.anchors:
            return min(sparse, CALIBRATED_ANCHORS)
        from tandemkv.cache_rank.calibration.resolve import share_of

        sources = share_of(self.anchors, ((),) * num_layers).sources
        return len({sources[x] for x in range(num_layers) if x not in others})

    @property
    def set_tokens(self) -> int:
        """Slots of one request's resident set and ring."""
        return self.num_resident + self.num_recent_tokens

    @property
    def row_tokens(self) -> int:
        """Tokens of one request that sparse layers attend to: set, ring and samples."""
        return self.set_tokens + self.num_samples

    @property
    def attended_tokens(self) -> int:
        """Tokens that one sparse layer attends to."""
        return min(self.context_tokens, self.row_tokens)

    @property
    def is_sparse(self) -> bool:
        """Whether the context is longer than what is resident."""
        return self.context_tokens > self.set_tokens

    def index_head_token_bytes(self, shape: ModelShape) -> float:
        """Bytes that one token's key takes in the index of one KV head, scales included.

        ``native`` scans the keys themselves.
        """
        if self.index_dtype == "native":
            return shape.key_bytes
        channels = self.index_channels or shape.head_dim
        if self.index_dtype == "int8":
            return channels + 4.0
        # A page of tokens shares scale and zero point, 2 + 2 bytes, per channel.
        has_states = bool(shape.linear_layers)
        page = page_tokens(self.index_dtype, self.num_recent_tokens, has_states=has_states)
        return channels / 2 + 4.0 * channels / page
