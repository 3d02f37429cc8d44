# SPDX-License-Identifier: Apache-2.0
"""From answers to figures with intervals, one row a configuration.

Whether the loss of long generation grows is told by quarters of the decoded tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandemkv.cache_rank.protocol.errors import SettingsError

from .bootstrap import BLOCK_TOKENS, Interval, block_interval, paired_interval, score_interval
from .configurations import Configuration
from .results import Answer, TaskResult
from .samples import digest

_PROBE_EVERY = 8
LAYER_GROUPS = 5
"""Groups of neighbouring layers whose recovered mass is told apart."""
_GROUP_PREFIX = "layers "
_OF_CONFIGURATION = (
    *("system", "policy", "budget", "variant", "attended_tokens", "exact_layers"),
    *("sees_question", "selection"),
)
"""Fields of a row that are those of its configuration."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Runs = Sequence[tuple[Configuration, Mapping[str, TaskResult]]]


class Score(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One task under one configuration."""

    value: float
    low: float
    high: float
    """The figure and its 95 % interval: a mean score, a perplexity, a share of tokens that agree,
    or a recovered share of attention."""
    samples: int
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None
    """Against dense, paired by sample: a difference of scores, or per cent of perplexity."""
    attended_share: float | None = None
    """Share of the context attended to in decode, over all layers."""
    details: dict[str, float] = {}
    items: list[float] = []
    """A figure a sample, in their order: its score, the mean negative log-likelihood of its tokens,
    or the share of tokens that agree."""
    items_of: str = ""
    """Digest of the names of those samples; reports of before have none."""

    @property
    def interval(self) -> Interval:
        """The figure itself."""
        return Interval(self.value, self.low, self.high)

    @property
    def gap(self) -> Interval | None:
        """The change against dense, if there is one."""
        if self.change is None or self.change_low is None or self.change_high is None:
            return None
        return Interval(self.change, self.change_low, self.change_high)


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One configuration. `moved_rows` and `moved_kib` are per request and decode step.

    `settings` are all that matter to its results, after `serve` decided what was open.
    """

    system: str
    policy: str
    budget: str
    attended_tokens: int | None
    exact_layers: list[int] = []
    sees_question: str = ""
    selection: dict[str, Any] = {}
    moved_rows: float | None = None
    moved_kib: float | None = None
    scores: dict[str, Score] = {}
    variant: str = ""
    settings: dict[str, Any] = {}

    @property
    def label(self) -> str:
        """Name in tables and plots."""
        name = f"{self.policy}, {self.variant}" if self.variant else self.policy
        if self.system == "tandemkv":
            return name
        return f"{name} ({'SGLang' if self.system == 'sglang' else self.system})"


class Summary(NamedTuple):
    """All rows, and the results that are left out because they are of other samples."""

    rows: list[Row]
    left_out: list[str]


def summarise(described: Mapping[str, Any], runs: Runs) -> Summary:
    """Return the figures of every configuration.

    `described` is what `campaign.describe` returned, `runs` what `results.read_runs` did. Raises
    `SettingsError` if no result belongs to the tasks described.
    """
    tasks: Mapping[str, Mapping[str, Any]] = described["tasks"]
    left_out, kept = [], []
    for configuration, results in runs:
        known = {name: results[name] for name in tasks if name in results}
        own = {n: r for n, r in known.items() if r.samples_digest == tasks[n]["samples_digest"]}
        left_out += [f"{configuration.slug}: {name}" for name in known if name not in own]
        kept.append((configuration, own))
    dense = next((results for configuration, results in kept if configuration.is_dense), {})
    rows = [_row(described, configuration, own, dense) for configuration, own in kept if own]
    if not rows:
        raise SettingsError("no result is of the tasks and samples of this campaign; measure first")
    return Summary(rows, left_out)


def _row_kib(described: Mapping[str, Any], configuration: Configuration) -> float:
    """Return what a key and a value of one KV head take, as the configuration keeps them."""
    is_fp8 = configuration.resolved.get("kv_dtype") == "fp8_e4m3"
    item_bytes = 1 if is_fp8 else _ITEM_BYTES.get(described["dtype"], 4)
    return float(2 * described["head_dim"] * item_bytes / 1024)


def _parts_told(configuration: Configuration) -> int:
    """Return of how many parts of the model the counted one stands for selection.

    Where every tensor-parallel rank has an engine in its process, the first one's alone is asked.
    """
    parts = configuration.resolved.get("tensor_parallel")
    is_first_alone = configuration.resolved.get("link") == "local"
    return parts if is_first_alone and isinstance(parts, int) else 1


def _row(
    described: Mapping[str, Any],
    configuration: Configuration,
    results: Mapping[str, TaskResult],
    dense: Mapping[str, TaskResult],
) -> Row:
    moved = [
        (r.fetched_rows_per_step, r.request_steps)
        for r in results.values()
        if r.fetched_rows_per_step is not None and r.request_steps
    ]
    nothing = 0.0 if configuration.system == "tandemkv" else None
    steps = sum(count for _, count in moved)
    told = _parts_told(configuration)
    mean_moved = sum(told * rows * count for rows, count in moved) / steps if moved else nothing
    return Row(
        **{name: getattr(configuration, name) for name in _OF_CONFIGURATION},
        settings=dict(configuration.resolved),
        moved_rows=mean_moved,
        moved_kib=mean_moved and mean_moved * _row_kib(described, configuration),
        scores={
            name: _score(
                configuration,
                result,
                dense.get(name),
                measure=described["tasks"][name]["measure"],
                share=_share(configuration, result, described["num_kv_heads"]),
            )
            for name, result in results.items()
        },
    )


class _Figures(NamedTuple):
    """Value, one figure a sample, change against dense, and further figures."""

    value: Interval
    items: Sequence[float]
    change: Interval | None = None
    details: Mapping[str, float] = MappingProxyType({})


def _score(
    configuration: Configuration, result: TaskResult, dense: TaskResult | None, *, measure: str,
    share: float | None,
) -> Score:  # fmt: skip
    pairs = _pairs(result, None if configuration.is_dense else dense)
    if measure == "mass":
        found = _mass(configuration, result)
    elif measure == "agreement":
        found = _agreement(result)
    elif measure == "score":
        found = _scored(result, pairs)
    else:
        found = _perplexity(result, pairs, with_quarters=measure == "long")
    change = found.change
    return Score(
        value=found.value.mean,
        low=found.value.low,
        high=found.value.high,
        samples=len(result.answers),
        change=change and change.mean,
        change_low=change and change.low,
        change_high=change and change.high,
        attended_share=share,
        details=dict(found.details),
        items=[round(item, 5) for item in found.items],
        items_of=digest([answer.name for answer in result.answers]),
    )


def _scored(result: TaskResult, pairs: Sequence[tuple[Answer, Answer]]) -> _Figures:
    scores = [a.score or 0.0 for a in result.answers]
    change = None
    if pairs:
        change = paired_interval(
            [a.score or 0.0 for a, _ in pairs], [b.score or 0.0 for _, b in pairs]
        )
    return _Figures(score_interval(scores), scores, change)


def _perplexity(
    result: TaskResult, pairs: Sequence[tuple[Answer, Answer]], *, with_quarters: bool
) -> _Figures:
    nll = [a.nll or [] for a in result.answers]
    value = Interval(*np.exp(block_interval(nll)).tolist())
    change = None
    if pairs:
        gap = block_interval([np.subtract(a.nll or [], b.nll or []) for a, b in pairs])
        change = Interval(*(100 * np.expm1(gap)).tolist())
    details = by_quarter(result.answers, pairs) if with_quarters else {}
    return _Figures(value, [float(np.mean(values)) for values in nll], change, details)


def _agreement(result: TaskResult) -> _Figures:
    agrees = [a.agrees or [] for a in result.answers]
    details = {
        "median_first_difference": float(
            np.median([[*same, False].index(False) for same in agrees])
        ),
        "without_difference": float(np.mean(list(map(all, agrees)))),
    }
    items = [float(np.mean(values)) for values in agrees]
    return _Figures(block_interval(agrees), items, details=details)


def _mass(configuration: Configuration, result: TaskResult) -> _Figures:
    probes = result.probes
    if probes is None:
        raise SettingsError(f"{configuration.slug}: {result.task} has no probes")
    value = block_interval([probes.mass], block=max(1, BLOCK_TOKENS // _PROBE_EVERY))
    oracle = float(np.mean(probes.oracle_mass))
    details = {
        "oracle_mass": oracle,
        "of_oracle": value.mean / oracle,
        "recall": float(np.mean(probes.recall)),
        "worst_layer": min(probes.mass_by_layer.values()),
    }
    return _Figures(value, [], details=details | _by_group(probes.mass_by_layer))


def is_of_perplexity(measure: str) -> bool:
    """Whether answers are summarised as perplexities, and changes in per cent of them."""
    return measure in ("perplexity", "long")


def has_changes(rows: Sequence[Row], task: str) -> bool:
    """Whether any row's answers to a task could be compared with dense's."""
    return any(task in row.scores and row.scores[task].gap is not None for row in rows)


def is_group(detail: str) -> bool:
    """Whether a name in `Score.details` is that of a group of layers."""
    return detail.startswith(_GROUP_PREFIX)


def _by_group(by_layer: Mapping[str, float]) -> dict[str, float]:
    """Mean over each of at most `LAYER_GROUPS` groups of neighbours: ``layers 2-7``."""
    layers = sorted(map(int, by_layer))
    size = -(-len(layers) // LAYER_GROUPS)
    groups = [layers[i : i + size] for i in range(0, len(layers), size)]
    return {
        f"{_GROUP_PREFIX}{group[0]}-{group[-1]}": float(np.mean([by_layer[str(x)] for x in group]))
        for group in groups
    }


def _share(configuration: Configuration, result: TaskResult, num_kv_heads: int) -> float | None:
    if configuration.attended_tokens is None:
        return 1.0
    if result.attended_share is None:
        return None
    counters, share = result.counters, result.attended_share
    context = counters.get("inference.context_tokens_total")
    if configuration.remote_tokens and context and configuration.num_selecting:
        # By all cache ranks, each for its heads.
        there = counters.get("cache.attended_by_policy_total", 0.0) * _parts_told(configuration)
        share += there / (num_kv_heads * configuration.num_selecting) / context
    return configuration.attended_share(min(1.0, share))


def _pairs(result: TaskResult, dense: TaskResult | None) -> list[tuple[Answer, Answer]]:
    if dense is None:
        return []
    others = {answer.name: answer for answer in dense.answers}
    return [(answer, others[answer.name]) for answer in result.answers if answer.name in others]


QUARTERS = 4

_Series = list[NDArray[np.float64]]


def by_quarter(
    answers: Sequence[Answer], pairs: Sequence[tuple[Answer, Answer]]
) -> dict[str, float]:
    """Return figures of each quarter of the forced tokens: ``perplexity_1`` to ``perplexity_4``.

    Each of `answers` has `nll`; `pairs`, with dense's answers to the same samples, may be empty.
    With pairs also ``change_N`` with ``_low`` and ``_high`` (per cent against dense),
    ``agreement_N`` (share of tokens whose likeliest is dense's), and ``growth`` with ``_low`` and
    ``_high``: change of the last quarter less that of the first, in per cent of perplexity.
    """
    found = {
        f"perplexity_{i}": float(np.exp(block_interval(part).mean))
        for i, part in enumerate(_quarters([np.asarray(a.nll or []) for a in answers]), 1)
    }
    if not pairs:
        return found
    gaps = _quarters([np.subtract(a.nll or [], b.nll or []) for a, b in pairs])
    for i, part in enumerate(gaps, 1):
        found |= _named(f"change_{i}", block_interval(part))
    size = min(len(values) for part in (gaps[0], gaps[-1]) for values in part)
    growth = [last[:size] - first[:size] for first, last in zip(gaps[0], gaps[-1], strict=True)]
    found |= _named("growth", block_interval(growth))
    same = [np.equal(a.best, b.best) for a, b in pairs if a.best and b.best]
    if same:
        agreement = _quarters([values.astype(np.float64) for values in same])
        found |= {
            f"agreement_{i}": float(np.mean(np.concatenate(part)))
            for i, part in enumerate(agreement, 1)
        }
    return found


def _quarters(series: Sequence[NDArray[np.float64]]) -> list[_Series]:
    parts = [np.array_split(values, QUARTERS) for values in series]
    return [[split[i] for split in parts] for i in range(QUARTERS)]


def _named(name: str, gap: Interval) -> dict[str, float]:
    percent = 100 * np.expm1(gap)
    return dict(zip((name, f"{name}_low", f"{name}_high"), percent.tolist(), strict=True))
