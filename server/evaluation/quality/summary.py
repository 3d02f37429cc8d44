# SPDX-License-Identifier: Apache-2.0
"""From answers to figures with intervals, one row a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tandemkv.cache_rank.protocol.errors import SettingsError

from .bootstrap import BLOCK_TOKENS, Interval, block_interval, mean_interval
from .configurations import Configuration
from .results import Answer, TaskResult

_PROBE_EVERY = 8
LAYER_GROUPS = 5
"""Groups of neighbouring layers whose recovered mass is told apart."""
_GROUP_PREFIX = "layers "
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Runs = Sequence[tuple[Configuration, Mapping[str, TaskResult]]]


class Score(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One task under one configuration.

    Attributes
    ----------
    value, low, high : float
        The figure and its 95 % interval: a mean score, a perplexity, a share of tokens that
        agree, or a recovered share of attention.
    change, change_low, change_high : float or None
        Against dense, paired by sample: a difference of scores, or per cent of perplexity.
    attended_share : float or None
        Share of the context attended to in decode, over all layers.
    details : dict
        Further figures of the measure.
    """

    value: float
    low: float
    high: float
    samples: int
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None
    attended_share: float | None = None
    details: dict[str, float] = {}


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One configuration. `moved_rows` and `moved_kib` are per request and decode step."""

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

    Parameters
    ----------
    described : mapping
        What `campaign.describe` returned: tasks, with their measure and the digest of their
        samples, and the shape of the model.
    runs : sequence
        What `results.read_runs` returned.

    Raises
    ------
    SettingsError
        If no result belongs to the tasks described.
    """
    tasks: Mapping[str, Mapping[str, Any]] = described["tasks"]
    left_out, kept = [], []
    for configuration, results in runs:
        own = {}
        for name in tasks:
            result = results.get(name)
            if result is None:
                continue
            if result.samples_digest == tasks[name]["samples_digest"]:
                own[name] = result
            else:
                left_out.append(f"{configuration.slug}: {name}")
        kept.append((configuration, own))
    dense = next((results for configuration, results in kept if configuration.is_dense), {})
    row_bytes = 2 * described["head_dim"] * _ITEM_BYTES.get(described["dtype"], 4)
    rows = [
        _row(configuration, results, dense, tasks, row_bytes)
        for configuration, results in kept
        if results
    ]
    if not rows:
        raise SettingsError("no result is of the tasks and samples of this campaign; measure first")
    return Summary(rows, left_out)


def _row(
    configuration: Configuration,
    results: Mapping[str, TaskResult],
    dense: Mapping[str, TaskResult],
    tasks: Mapping[str, Mapping[str, Any]],
    row_bytes: int,
) -> Row:
    moved = [r.fetched_rows_per_step for r in results.values() if r.fetched_rows_per_step]
    mean_moved = float(np.mean(moved)) if moved else None
    if mean_moved is None and configuration.system == "tandemkv":
        mean_moved = 0.0
    return Row(
        system=configuration.system,
        policy=configuration.policy,
        budget=configuration.budget,
        variant=configuration.variant,
        attended_tokens=configuration.attended_tokens,
        exact_layers=configuration.exact_layers,
        sees_question=configuration.sees_question,
        selection=dict(configuration.selection),
        moved_rows=mean_moved,
        moved_kib=None if mean_moved is None else mean_moved * row_bytes / 1024,
        scores={
            name: _score(configuration, result, dense.get(name), tasks[name]["measure"])
            for name, result in results.items()
        },
    )


def _score(
    configuration: Configuration, result: TaskResult, dense: TaskResult | None, measure: str
) -> Score:
    reference = None if configuration.is_dense or dense is None else dense
    pairs = _pairs(result, reference)
    details: dict[str, float] = {}
    change: Interval | None = None
    if measure == "score":
        found = mean_interval([a.score or 0.0 for a in result.answers])
        if pairs:
            change = mean_interval([(a.score or 0.0) - (b.score or 0.0) for a, b in pairs])
    elif measure == "perplexity":
        nll = block_interval([a.nll or [] for a in result.answers])
        found = Interval(*np.exp(nll).tolist())
        if pairs:
            gap = block_interval([np.subtract(a.nll or [], b.nll or []) for a, b in pairs])
            change = Interval(*(100 * np.expm1(gap)).tolist())
    elif measure == "agreement":
        found = block_interval([a.agrees or [] for a in result.answers])
        firsts = [_first_difference(a.agrees or []) for a in result.answers]
        details["median_first_difference"] = float(np.median(firsts))
        details["without_difference"] = float(
            np.mean([all(a.agrees or []) for a in result.answers])
        )
    else:
        probes = result.probes
        if probes is None:
            raise SettingsError(f"{configuration.slug}: {result.task} has no probes")
        found = block_interval([probes.mass], block=max(1, BLOCK_TOKENS // _PROBE_EVERY))
        details["oracle_mass"] = float(np.mean(probes.oracle_mass))
        details["of_oracle"] = found.mean / details["oracle_mass"]
        details["recall"] = float(np.mean(probes.recall))
        details["worst_layer"] = min(probes.mass_by_layer.values())
        details |= _by_group(probes.mass_by_layer)
    return Score(
        value=found.mean,
        low=found.low,
        high=found.high,
        samples=len(result.answers),
        change=change and change.mean,
        change_low=change and change.low,
        change_high=change and change.high,
        attended_share=_share(configuration, result),
        details=details,
    )


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


def _share(configuration: Configuration, result: TaskResult) -> float | None:
    if configuration.attended_tokens is None:
        return 1.0
    if result.attended_share is None:
        return None
    share, context = result.attended_share, result.counters.get("inference.context_tokens_total")
    if configuration.remote_tokens and context and result.request_steps:
        share += configuration.remote_tokens * result.request_steps / context
    return configuration.attended_share(min(1.0, share))


def _pairs(result: TaskResult, dense: TaskResult | None) -> list[tuple[Answer, Answer]]:
    if dense is None:
        return []
    others = {answer.name: answer for answer in dense.answers}
    return [(answer, others[answer.name]) for answer in result.answers if answer.name in others]


def _first_difference(agrees: Sequence[bool]) -> int:
    """Tokens before the first that differs; all of them if none does."""
    return next((i for i, same in enumerate(agrees) if not same), len(agrees))
