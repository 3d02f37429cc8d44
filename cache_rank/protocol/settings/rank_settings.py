# SPDX-License-Identifier: Apache-2.0
"""Settings that both ranks must agree on.

They travel as one JSON value (environment variable ``TANDEMKV_SETTINGS``) and are compared
field by field in the handshake. The launcher's own settings embed this tree
(`tandemkv.server.settings.launch_settings`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tandemkv.cache_rank.protocol.messages import MAX_SETTINGS_BYTES

from .declared import DeclaredPolicy
from .exchange_settings import CacheSettings, ExchangeSettings
from .frozen_model import FrozenModel
from .placement import Placement
from .token_count import TokenCount

SETTINGS_VARIABLE = "TANDEMKV_SETTINGS"
RUN_DIR_VARIABLE = "TANDEMKV_RUN_DIR"
NODES_VARIABLE = "TANDEMKV_NODES"
"""HOST:PORT where SGLang's processes of several hosts meet; empty if all are on one."""
PROBE_VARIABLE = "TANDEMKV_PROBE_FILE"
"""With ``evaluation``: where the probes write what each decode step attended to."""
DETAIL_VARIABLE = "TANDEMKV_PROBE_DETAIL"
"""``1``: every step is probed, and the sets of tokens are written too."""

DEFAULT_POLICY = "look_ahead"
"""`DeclaredPolicy` is its declaration, where nobody enters another."""

SAMPLE_STEP = 128
"""The default has a multiple of it; fewer are too few for a flat layer (docs/decisions/0018)."""

DEFAULT_BUDGET = 896
"""K. Beside no less there are as many samples as a policy wants (docs/decisions/0028)."""

LEAST_FETCH_CAP = 64
"""What the default fetch cap does not go below: half of a small K is too few (decision 19)."""

FLAT_LAYERS = (0, 1)
"""Layers whose attention is too flat for the best tokens to stand for it (docs/decisions/0018)."""


OptionValue = bool | int | float | Annotated[str, Field(max_length=4096)] | None
OptionValues = Annotated[
    dict[
        Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$", max_length=64)],
        OptionValue | Annotated[tuple[OptionValue, ...], Field(max_length=1024)],
    ],
    Field(max_length=64),
]
"""Options of a policy by name, as settings carry them; the policy's own model checks the values."""


def default_samples(wanted: int, budget_tokens: int) -> int:
    """Return how many samples there are of those `wanted` beside K = `budget_tokens`."""
    if budget_tokens >= DEFAULT_BUDGET:
        return wanted
    return min(wanted, budget_tokens // SAMPLE_STEP * SAMPLE_STEP)


class SelectionSettings(FrozenModel):
    """What is attended to, and who decides it. Token counts are per KV head."""

    policy: str = Field(
        default=DEFAULT_POLICY,
        max_length=1024,
        description="What selects: a name from `tandemkv policies`, or module:Class of your own.",
    )
    declared: DeclaredPolicy = Field(
        default_factory=DeclaredPolicy, description="What the policy's class declares."
    )
    options: OptionValues = Field(
        default_factory=dict,
        description="The policy's own options, those that differ from their defaults.",
    )
    budget_tokens: int = Field(
        default=DEFAULT_BUDGET, ge=0, le=65536, description="K: tokens selected per KV head."
    )
    resident_factor: float = Field(
        default=1.0,
        ge=1.0,
        le=16.0,
        description="c: the resident set holds sink + c*K tokens, and all of them are attended to.",
    )
    num_sink_tokens: int = Field(
        default=4, ge=0, le=1024, description="First tokens, always resident."
    )
    num_recent_tokens: int = Field(
        default=64,
        ge=2,
        le=16384,
        description="Latest tokens, a ring. Default: 64; on GPUs, with an int4 index, 128.",
    )
    sample_tokens: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="Evenly spaced tokens that are attended to and stand for all that are not "
        "resident; even, at most 1024. Default 1024 for look_ahead and oracle, or with K below 896 "
        "at most K, in steps of 128; else 0.",
    )
    fetch_cap: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Rows fetched per head and step at most; default K/2, but at least 64, "
        "or K if that is less; sfi and sync_kv K.",
    )
    index_dtype: Literal["native", "int8", "int4"] = Field(
        default="native",
        description="Precision of the keys that are searched; attention is never quantised. "
        "`serve` takes int4 on GPUs unless told otherwise.",
    )
    index_channels: str | None = Field(
        default=None,
        min_length=1,
        description="int8 or int4 index: file of `tandemkv calibrate --index-channels` that names "
        "the channels of keys that are searched; all by default.",
    )
    exact_layers: tuple[int, ...] | None = Field(
        default=None,
        description="Layers that attend to everything; default none for look_ahead and oracle with "
        "128 samples or more and no shared layers, else 0,1, where attention is flat.",
    )
    late_layers: int | None = Field(
        default=None,
        ge=0,
        le=8,
        description="look_ahead: number of first layers whose tokens are selected at the end of "
        "the step before, so that no step begins with waiting. Default 0; with serve 1 "
        "where a second GPU selects, if layer 0 is not exact.",
    )
    predictor_dtype: Literal["native", "int8"] | None = Field(
        default=None,
        description="look_ahead: precision of the W_q that predicts queries; int8 is a "
        "copy. Default int8 where a second GPU has an int4 index, else native.",
    )
    refresh_every: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Select every n-th step; default 1. Not sfi and sync_kv, which have options of "
        "their own for it.",
    )
    seed_window: int = Field(
        default=64, ge=1, le=1024, description="Prompt queries that seed the set."
    )
    dense_while_fits: bool = Field(
        default=True, description="Skip selection while everything is resident; off only for tests."
    )
    dense_tokens: TokenCount | None = Field(
        default=None,
        ge=0,
        le=1 << 24,
        description="Requests up to this length attend to everything (not with a second GPU, or by "
        "messages); default what is resident anyway, with serve the length up to which that is no "
        "slower, or on a CPU what a step attends to anyway.",
    )
    dense_batch_tokens: TokenCount | None = Field(
        default=None,
        ge=0,
        le=1 << 20,
        description="So do all requests of a step that has no more tokens than this in all; "
        "default none, with serve the number up to which that is no slower.",
    )
    pooling: Literal["softmax_mean", "max_logit", "mean_logit"] = Field(
        default="softmax_mean", description="How the query heads of a group are pooled."
    )
    pool_before: int = Field(
        default=0,
        ge=0,
        le=31,
        description="A token also takes the best score of as many tokens before it. 1 suits "
        "policies that select for the next step: its query attends to what follows.",
    )
    pool_after: int = Field(
        default=0, ge=0, le=31, description="The same for tokens after it; SnapKV has 3 and 3."
    )
    calibration: str | None = Field(
        default=None,
        min_length=1,
        description="kascade, sync_kv: file of `tandemkv calibrate`; default the shipped one.",
    )
    anchors: tuple[int, ...] = Field(
        default=(), description="kascade: anchor layers, with identity head maps; no file is read."
    )
    share_layers: bool = Field(
        default=False,
        description="Any policy that selects tokens, but sync_kv: do so in kascade's anchor layers "
        "only, the others follow.",
    )

    @property
    def num_resident(self) -> int:
        """R: slots of the resident set, the ring not counted."""
        if self.declared.keeps_sink_only:
            return self.num_sink_tokens
        # 1.15 times 100 is 114.99999999999999.
        return self.num_sink_tokens + int(round(self.resident_factor * self.budget_tokens, 6))

    @property
    def num_samples(self) -> int:
        """Tokens per KV head that stand for what is not resident."""
        if self.sample_tokens is not None:
            return self.sample_tokens
        return default_samples(self.declared.default_samples, self.budget_tokens)

    @property
    def exact_layer_ids(self) -> tuple[int, ...]:
        """`exact_layers`, or what they are where they are left open."""
        if self.exact_layers is not None:
            return self.exact_layers
        has_samples = self.declared.default_samples and self.num_samples >= SAMPLE_STEP
        return () if has_samples and not self.share_layers else FLAT_LAYERS

    @property
    def row_tokens(self) -> int:
        """Tokens that a request has on the inference rank, and attends to at most."""
        return self.num_resident + self.num_recent_tokens + self.num_samples

    @property
    def num_late(self) -> int:
        """`late_layers`, or none where it is left open."""
        return self.late_layers or 0

    @property
    def late_between_gpus(self) -> int:
        """`late_layers`, or what `serve` takes for a second GPU where it is left open."""
        if self.late_layers is not None:
            return self.late_layers
        may = self.declared.predicts_from_hidden and 0 not in self.exact_layer_ids
        return int(may and not self.share_layers)

    def most_late(self, num_layers: int, others: Collection[int] = ()) -> int:
        """Return how many late layers a model of `num_layers` may have.

        All must have attended where the last layer that is selected for has its selection begun.
        Nothing is selected for `others`.
        """
        selecting = set(range(num_layers)) - {*self.exact_layer_ids, *others}
        return max(0, max(selecting, default=0) - self.declared.layers_ahead)

    def predictor_dtype_of(self, *, on_second_gpu: bool) -> str:
        """Return `predictor_dtype`, or what it is on another GPU or the model's if left open."""
        is_int8 = on_second_gpu and self.index_dtype == "int4"
        return self.predictor_dtype or ("int8" if is_int8 else "native")

    @property
    def refresh_steps(self) -> int:
        """`refresh_every`, or 1 where it is left open."""
        return self.refresh_every or 1

    @property
    def most_steps_between(self) -> int:
        """Steps from one selection of a request to the next, at most."""
        declared = self.declared
        return declared.refresh_interval if declared.has_slow_steps else self.refresh_steps

    @property
    def pooled_positions(self) -> tuple[int, int]:
        """Positions before and after a token whose scores it takes, too."""
        return self.pool_before, self.pool_after

    @property
    def keeps_dense_while_fits(self) -> bool:
        """Whether contexts of R + ring tokens skip selection; a sink alone is never filled up."""
        declared = self.declared
        return self.dense_while_fits or (declared.keeps_sink_only and not declared.all_exact)

    @property
    def fetch_cap_tokens(self) -> int:
        """Rows fetched per head and step at most; more than are resident cannot be missing."""
        cap = self.fetch_cap
        if cap is None and self.declared.has_slow_steps:
            cap = max(1, self.budget_tokens)  # it selects seldom, and then all of it
        elif cap is None:
            cap = max(1, self.budget_tokens // 2, min(self.budget_tokens, LEAST_FETCH_CAP))
        return min(cap, self.num_resident)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.declared.keeps_sink_only:
            floor = self.num_sink_tokens + self.num_recent_tokens
            if self.budget_tokens < floor:
                raise ValueError(
                    f"budget_tokens={self.budget_tokens} is smaller than num_sink_tokens + "
                    f"num_recent_tokens = {floor}; raise --budget-tokens or lower the other two"
                )
        if self.num_samples % 2:
            raise ValueError(f"sample_tokens={self.sample_tokens} must be even, or 0 for none")
        if self.num_samples and self.declared.keeps_sink_only:
            raise ValueError(
                f"policy={self.policy} selects nothing that samples could stand beside; use "
                "--sample-tokens 0"
            )
        for name in ("late_layers", "predictor_dtype"):
            if getattr(self, name) and not self.declared.predicts_from_hidden:
                raise ValueError(
                    f"{name} is for policies that predict queries from the residual stream, not "
                    f"policy={self.policy}; use --policy look_ahead, "
                    f"or drop --{name.replace('_', '-')}"
                )
        if not self.dense_while_fits and self.refresh_steps != 1:
            raise ValueError("dense_while_fits=false needs refresh_every=1")
        if not self.dense_while_fits and self.dense_batch_tokens:
            raise ValueError(
                f"dense_batch_tokens={self.dense_batch_tokens}: sets would not fill meanwhile, and "
                "dense_while_fits=false uses them at any length; drop one of the two"
            )
        return self

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if self.late_layers and self.share_layers:
            raise ValueError("late_layers does not go with share_layers; drop one of the two")
        if self.num_late and set(self.exact_layer_ids) & set(range(self.num_late)):
            raise ValueError(
                f"late_layers={self.late_layers}: nothing is selected for exact layers, and "
                f"exact_layers={','.join(map(str, self.exact_layer_ids))} has some of these; use "
                "--exact-layers none, or drop --late-layers"
            )
        if any(layer < 0 for layer in self.anchors) or list(self.anchors) != sorted(
            set(self.anchors)
        ):
            raise ValueError(f"anchors={self.anchors} must be ascending layer ids")
        if self.declared.attends and (self.refresh_steps != 1 or not self.num_sink_tokens):
            raise ValueError(
                f"policy={self.policy} attends in every step, beside the sink: it needs "
                "refresh_every=1 and num_sink_tokens of at least 1"
            )
        if self.declared.attends and self.share_layers:
            raise ValueError(
                f"policy={self.policy} attends in every layer, and cannot share selections; drop "
                "--share-layers"
            )
        if any(layer < 0 for layer in self.exact_layer_ids):
            raise ValueError(f"exact_layers={self.exact_layers} must not be negative")
        return self

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        flat = _flat(self.model_dump(mode="json"))
        sizes = {name: len(text.encode()) for name, text in flat.items()}
        total, longest = sum(sizes.values()), max(sizes, key=sizes.__getitem__)
        if total > MAX_SETTINGS_BYTES:
            raise ValueError(
                f"{longest} is too long: with its {sizes[longest]} bytes as text these settings "
                f"have {total}, and both ranks compare {MAX_SETTINGS_BYTES} at most"
            )
        return self


class RankSettings(FrozenModel):
    """Everything that both ranks must agree on."""

    selection: SelectionSettings = Field(default_factory=SelectionSettings)
    placement: Placement = Field(default_factory=Placement)
    exchange: ExchangeSettings = Field(default_factory=ExchangeSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    evaluation: bool = Field(
        default=False, description="Allow forced tokens and attention probes; off when serving."
    )
    stress_selection: bool = Field(
        default=False,
        description="Benchmarks only: queries jump, so that every step moves all it may.",
    )

    def flat(self) -> dict[str, str]:
        """Dotted name to JSON-like text, for the field-by-field comparison.

        Of the placement all but the device, of which a rank that was started by itself knows its
        own, and the reason.
        """
        tree = self.model_dump(mode="json")
        names = ("link", "two_gpus", "host_engine", "tp_size", "head_shards")
        tree["placement"] = {name: getattr(self.placement, name) for name in names}
        return _flat(tree)


def _flat(tree: dict[str, Any]) -> dict[str, str]:
    """Return the leaves of `tree` as text, by dotted name."""
    flat: dict[str, str] = {}

    def enter(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                enter(f"{prefix}.{key}" if prefix else key, item)
        else:
            flat[prefix] = str(value)

    enter("", tree)
    return flat
