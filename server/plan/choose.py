# SPDX-License-Identifier: Apache-2.0
"""Choose a placement, or refuse a load with the numbers; and up to which lengths not to select."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

from .cost import H200, CostConstants, StepTime, predict_step
from .footprint import GIB, USABLE_FRACTION, PlacementMemory, memory_of
from .placement import Placement, PlacementKind
from .shape import ModelShape
from .workload import Workload

_BY_MESSAGES = (
    "it fits; each GPU of the model holds all of its K/V as well, and the time per token by "
    "messages is not predicted"
)
_NO_SLOWER = "attend to everything, which is predicted to be no slower there"
_TIMES = (
    "; at this load all do, and the predicted times are those of steps that select: stock SGLang's "
    "are nearer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """One placement with its memory and its predicted step."""

    placement: Placement
    memory: PlacementMemory
    step: StepTime
    """By messages that of cache GPUs whose memory is mapped, which is not to be shown."""
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """All placements, and the one to take.

    `chosen` is None where none of tandemkv's placements fits; `reason` says why either way.
    `cost` has the constants of the prediction. `is_asked`: there was no other to take.
    """

    plans: tuple[PlacementPlan, ...]
    chosen: PlacementPlan | None
    reason: str
    cost: CostConstants = H200
    is_asked: bool = False

    @property
    def gains(self) -> bool:
        """Whether stock SGLang is predicted to be slower than `chosen`, or cannot hold the load."""
        dense = self.plans[0]
        return self.chosen is not None and _is_slower(dense, self.chosen)


def _is_slower(dense: PlacementPlan, own: PlacementPlan) -> bool:
    return not dense.fits or dense.step.tpot_ms > own.step.tpot_ms


def choose_placement(
    placements: Iterable[Placement],
    shape: ModelShape,
    load: Workload,
    *,
    gpu_bytes: int,
    available: Collection[str] | None = None,
    cost: CostConstants = H200,
    is_asked: bool = False,
) -> Choice:
    """Choose the placement with the least predicted time per token among those that fit.

    `placements` are those of `possible_placements`, on GPUs that have `gpu_bytes` each; `available`
    names those that may be chosen, default all; of them those that `serve` takes unasked, or if
    none of these fits, any. Stock SGLang, the first, never is, and is there for comparison.
    """
    plans = []
    for placement in placements:
        memory, step = memory_of(placement, shape, load), predict_step(placement, shape, load, cost)
        fits = _fits(memory, gpu_bytes)
        plans.append(PlacementPlan(placement=placement, memory=memory, step=step, fits=fits))
    dense, *own = plans
    if available is not None:
        own = [plan for plan in own if plan.placement.name in available]
    fitting = [plan for plan in own if plan.fits]
    offered = [plan for plan in fitting if plan.placement.is_chosen]
    best = min(
        offered or fitting,
        key=lambda plan: (plan.step.tpot_ms, plan.placement.num_gpus),
        default=None,
    )
    if best is not None and best.placement.by_messages:
        reason = _BY_MESSAGES
    elif best is not None:
        reason = f"{_reason(best, own, dense, load)}; constants of {cost.origin}"
    elif own:
        least = min(own, key=lambda plan: plan.memory.largest.total)
        reason = _overflow(least.placement, least.memory, shape, load, gpu_bytes)
    else:
        reason = "none of the placements that this version offers is possible here"
    return Choice(plans=tuple(plans), chosen=best, reason=reason, cost=cost, is_asked=is_asked)


def check_fits(placement: Placement, shape: ModelShape, load: Workload, *, gpu_bytes: int) -> None:
    """Refuse a load that `placement` cannot hold.

    Raises `SettingsError`, with each part in GiB, and the concurrency or context that would fit.
    """
    memory = memory_of(placement, shape, load)
    if not _fits(memory, gpu_bytes):
        raise SettingsError(_overflow(placement, memory, shape, load, gpu_bytes))


def largest_fitting(
    placement: Placement, shape: ModelShape, load: Workload, field: str, *, gpu_bytes: int
) -> int:
    """Return the largest `field` of `load` (an integer one) that fits, 0 if not even 1 does.

    Found by bisection: memory never shrinks when a field grows.
    """

    def overflows(number: int) -> bool:
        changes: dict[str, Any] = {"capacity_tokens": None, field: number}
        if field == "context_tokens" and load.max_context is not None:
            changes["max_context"] = number
        return not _fits(memory_of(placement, shape, replace(load, **changes)), gpu_bytes)

    return bisect_left(range(1, getattr(load, field) + 1), True, key=overflows)


def break_even_tokens(
    shape: ModelShape, load: Workload, tp_size: int, cost: CostConstants = H200
) -> int:
    """Return the context up to which attending to everything is predicted to be no slower.

    In-process, over `tp_size` GPUs, at the concurrency of `load`; a multiple of 256, at least
    what is resident anyway and at most the context of `load`. Found by bisection: what
    selection saves grows with the context.
    """
    dense = Placement(kind=PlacementKind.DENSE, tp_size=tp_size)
    own = Placement(kind=PlacementKind.IN_PROCESS, tp_size=tp_size)

    def is_own_faster(context: int) -> bool:
        trial = replace(load, context_tokens=context, capacity_tokens=None)
        times = [predict_step(x, shape, trial, cost).tpot_ms for x in (dense, own)]
        return times[1] < times[0]

    if load.context_tokens <= load.attended_tokens:
        return load.context_tokens
    least = load.attended_tokens // 256 * 256
    longer = range(least + 256, load.context_tokens + 1, 256)
    return least + 256 * bisect_left(longer, True, key=is_own_faster)


def break_even_batch_tokens(
    shape: ModelShape, load: Workload, tp_size: int, cost: CostConstants = H200
) -> int:
    """Return the tokens of a whole batch up to which attending to everything is no slower.

    What it costs is how many tokens there are, whoever's they are, so one number does for batches
    of every size: the least that is predicted for those of up to the concurrency of `load`, and
    at most what one request may have.
    """
    found = []
    for size in (1 << n for n in range(load.concurrency.bit_length())):
        each = max(1, load.total_tokens // size)
        trial = replace(load, concurrency=size, context_tokens=each)
        if trial.context_tokens > trial.attended_tokens:  # else all do, whatever the limit is
            found.append(size * break_even_tokens(shape, trial, tp_size, cost))
    return min(found, default=load.total_tokens)


def _fits(memory: PlacementMemory, gpu_bytes: int) -> bool:
    return memory.largest.total <= gpu_bytes * USABLE_FRACTION


def _overflow(
    placement: Placement, memory: PlacementMemory, shape: ModelShape, load: Workload, gpu_bytes: int
) -> str:
    usable = gpu_bytes * USABLE_FRACTION
    roles = ", ".join(
        f"each {role} GPU needs {footprint.total / GIB:.1f} GiB ({footprint.describe()})"
        for role, footprint in memory.roles
        if footprint.total > usable
    )
    concurrency = largest_fitting(placement, shape, load, "concurrency", gpu_bytes=gpu_bytes)
    context = largest_fitting(placement, shape, load, "context_tokens", gpu_bytes=gpu_bytes)
    if load.capacity_tokens is not None and concurrency == load.concurrency:
        return (
            f"{load.total_tokens} tokens of KV do not fit {placement.title}: {roles}, of "
            f"{usable / GIB:.1f} GiB usable; {load.concurrency} requests of {load.context_tokens} "
            f"tokens would, with --cache-tokens {load.concurrency * load.context_tokens}"
        )
    advice = [f"{concurrency} requests of this length would fit"] if concurrency else []
    if not advice and context < 1024:
        alone = largest_fitting(
            placement, shape, replace(load, concurrency=1), "context_tokens", gpu_bytes=gpu_bytes
        )
        if alone >= 1024:
            advice.append(f"one request of {alone // 256 * 256} tokens would fit")
    if context >= 1024:
        length = context // 256 * 256
        bound = "" if load.max_context is None else f" (--max-context {length})"
        advice.append(f"{load.concurrency} requests of {length} tokens would fit{bound}")
    return (
        f"{load.total_tokens} tokens of KV ({load.concurrency} requests of {load.context_tokens}) "
        f"do not fit {placement.title}: {roles}, of {usable / GIB:.1f} GiB usable; "
        + (", or ".join(advice) or "use more GPUs (--nnodes: of several hosts) or a smaller model")
    )


def _reason(
    best: PlacementPlan, own: Iterable[PlacementPlan], dense: PlacementPlan, load: Workload
) -> str:
    chosen = best.placement
    others = [plan for plan in own if plan.fits and plan is not best]
    faster = [plan for plan in others if plan.step.tpot_ms < best.step.tpot_ms]
    least = "least " if others else ""
    among = " of those that serve takes by itself" if faster else ""
    words = [f"{least}predicted time per token{among}, {best.step.tpot_ms:.1f} ms"]
    words += [f"{plan.placement.name} {plan.step.tpot_ms:.1f} ms" for plan in others]
    if left_out := [plan.placement.name for plan in own if not plan.fits]:
        words.append(f"{', '.join(left_out)} does not fit")
    if not dense.fits:
        words.append("stock SGLang cannot hold this load")
    elif not _is_slower(dense, best):
        words.append(
            f"stock SGLang is predicted to be no slower ({dense.step.tpot_ms:.1f} ms): at this "
            "load tandemkv gains nothing"
        )
    else:
        gain = dense.step.tpot_ms / best.step.tpot_ms
        words.append(f"stock SGLang {dense.step.tpot_ms:.1f} ms, {gain:.1f} times as long")
    if faster:
        names = ", ".join(plan.placement.name for plan in faster)
        words.append(f"serve takes {names} only if its flags are given")
    elif not chosen.is_chosen:
        words.append(f"serve takes {chosen.name} only if its flags are given")
    if not chosen.has_run:
        words.append(f"{chosen.name} was never run on GPUs")
    if not load.is_sparse:
        words.append("the whole context is resident, so nothing is selected")
    return "; ".join(words)


class DenseText(NamedTuple):
    """Lengths in tokens that are predicted, by name, and a sentence on all of them."""

    break_even: dict[str, int]
    said: str


def dense_lengths(
    selection: SelectionSettings, choice: Choice, shape: ModelShape, load: Workload
) -> DenseText:
    """Return the lengths of a request, and of a step in all, up to which attention is dense.

    As `serve` decides them: given ones are kept, and the others are predicted, but only where the
    model's GPU has the K/V and the policy attends to more with more tokens.
    """
    from tandemkv.cache_rank.protocol.engine import DenseLengths  # with torch

    chosen = None if choice.chosen is None else choice.chosen.placement
    if chosen is None or chosen.kind is not PlacementKind.IN_PROCESS:
        return DenseText({}, "")
    together = selection.dense_batch_tokens
    if selection.dense_tokens is not None or not selection.dense_while_fits:
        each = DenseLengths.of(selection, selection.num_resident).num_dense
        return DenseText({}, _given(each, together or 0, load))
    if selection.declared.keeps_sink_only:
        return DenseText({}, "")
    each = break_even_tokens(shape, load, chosen.tp_size, choice.cost)
    if together is not None:
        said = f"break-even: requests of up to {each} tokens {_NO_SLOWER}"
        asked = _given(0, together, load)
        return DenseText({"tokens": each}, f"{said}; {asked}" if asked else said)
    together = break_even_batch_tokens(shape, load, chosen.tp_size, choice.cost)
    return DenseText(
        {"tokens": each, "batch_tokens": together},
        f"break-even: requests of up to {each} tokens, and steps of no more than {together} in "
        f"all, {_NO_SLOWER}",
    )


def _given(each: int, together: int, load: Workload) -> str:
    """Return what is said of lengths that were asked for; 0: there is none."""
    parts = [f"requests of up to {each} tokens"] if each else []
    parts += [f"steps of no more than {together} in all"] if together else []
    if not parts:
        return ""
    said = f"with the lengths that were given, {' and '.join(parts)} attend to everything"
    is_all = each >= load.context_tokens or together >= load.total_tokens
    return said + (_TIMES if is_all else "")
