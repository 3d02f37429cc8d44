# SPDX-License-Identifier: Apache-2.0
"""What of a policy fused kernels do, and which of its own methods have to be called.

Nothing is recognised by class or name. A policy ranks with kernels as long as nothing that says
otherwise is overridden; whatever is overridden is called, or the policy is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from tandemkv.cache_rank.protocol.settings.placement import Placement

from .attending import AttendingPolicy
from .base import Policy, PolicyError, ScoringPolicy

_RANKING = ("select", "query_for", "pooled", "observe", "predict")
_PREDICTING = ("observe_prompt", "release")
"""What keeps a window that a kernel keeps as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """Own methods of a policy that the engine calls, besides `seed_scores`, `release`, `attend`."""

    selects: bool
    """In decode `select`, and `observe` if it wants to; else kernels rank all candidates."""
    observes_prompt: bool
    """`observe_prompt`."""
    forgets: bool
    """What it remembers of a request is lost with the process: it does not make its rows
    (`Policy.make_rows`)."""

    @classmethod
    def of(cls, policy: type[Policy]) -> Self:
        """Return what is overridden.

        Of a policy with `PolicyCapabilities.prediction` that is what differs from the class that
        declares it: its own window and prediction are those of a kernel.
        """
        capabilities = policy.capabilities
        fused: type = ScoringPolicy
        names: tuple[str, ...] = _RANKING
        if capabilities.prediction is not None:
            fused = next(c for c in policy.__mro__ if "capabilities" in vars(c))
            names += _PREDICTING
        chooses = capabilities.selects and not capabilities.attends
        selects = chooses and any(_differs(policy, fused, name) for name in names)
        is_kept = capabilities.prediction is not None and not selects
        return cls(
            selects=selects,
            observes_prompt=not is_kept and _differs(policy, Policy, "observe_prompt"),
            forgets=not is_kept
            and _differs(policy, Policy, "release")
            and not _differs(policy, Policy, "make_rows"),
        )


def is_captured(policy: type[Policy]) -> bool:
    """Return whether a GPU captures the policy's decode steps once, and replays them.

    Not if they differ from step to step, or a method of its own runs in them that is not declared
    to be `PolicyCapabilities.graph_safe`. Then each step is launched anew.
    """
    capabilities = policy.capabilities
    is_called = capabilities.attends or Composition.of(policy).selects
    return (capabilities.graph_safe or not is_called) and not capabilities.has_slow_steps


def check_device(policy: type[Policy], name: str, device: str) -> None:
    """Refuse a policy that cannot run in an engine on `device`, ``cpu`` or ``cuda``.

    Raises `PolicyError`, saying why, and what to do.
    """
    capabilities = policy.capabilities
    if device not in capabilities.devices:
        raise PolicyError(
            f"policy={name} does not run on {device}; use --device {capabilities.devices[0]}, or "
            "another --policy"
        )


def check_kv_dtype(policy: type[Policy], name: str, dtype: str) -> None:
    """Refuse a policy that cannot read K and V of a model in `dtype`, which is not ``auto``.

    Raises `PolicyError`, saying what to do.
    """
    readable = policy.capabilities.kv_dtypes
    if dtype not in readable:
        raise PolicyError(
            f"policy={name} reads K and V in {' or '.join(readable)}, and those of the model are "
            f"in {dtype}; use --dtype {readable[-1]}, or another --policy"
        )


def check_placement(policy: type[Policy], name: str, placement: Placement) -> None:
    """Refuse a policy whose steps are not captured where processes with GPUs need them to be.

    They do by messages, and with several cache ranks. Raises `PolicyError`, saying what to do.
    """
    if placement.model_device != "cuda" or not placement.maps_memory or is_captured(policy):
        return
    is_alone = placement.link == "shared" and placement.head_shards == 1
    # What an engine on the CPU does is captured by nobody.
    is_safe = not (placement.host_engine and policy.capabilities.has_slow_steps)
    if not (is_alone and is_safe):
        raise PolicyError(
            f"policy={name}: its decode steps are not captured. Beside a model on a GPU such a "
            "policy has one cache rank, on another GPU of the same host, or is in SGLang's "
            "process; use --cache-ranks 1 --transport shared, --cache-ranks 0, or another --policy"
        )


def check_shards(policy: type[Policy], name: str, num_shards: int) -> None:
    """Refuse a policy that needs all KV heads, where `num_shards` cache ranks have a part each.

    Raises `PolicyError`, saying what to do.
    """
    declaring = next(c for c in policy.__mro__ if "capabilities" in vars(c))
    changed = policy.__mro__[: policy.__mro__.index(declaring)]
    is_changed = any(callable(member) for each in changed for member in vars(each).values())
    if num_shards > 1 and (is_changed or not policy.capabilities.per_head):
        raise PolicyError(
            f"policy={name} does not declare itself that it selects for each KV head alone "
            f"(PolicyCapabilities.per_head), and {num_shards} cache ranks have a part of the heads "
            "each; use --cache-ranks 1, or another --policy"
        )


def check_class(policy: type[Policy], name: str) -> None:
    """Refuse a class whose declaration and methods contradict each other.

    Raises `PolicyError`, saying what to change.
    """
    if policy.capabilities.attends != issubclass(policy, AttendingPolicy):
        raise PolicyError(
            f"policy={name}: Timing.SAME_STEP_ATTENTION is for subclasses of AttendingPolicy, and "
            "these have no other timing; change one of the two"
        )
    chooses = policy.capabilities.selects and not policy.capabilities.attends
    if chooses and not _differs(policy, Policy, "select"):
        raise PolicyError(
            f"policy={name}: it has a timing to select at, and no `select`; write one, or make it "
            "a subclass of ScoringPolicy"
        )


def _differs(policy: type, base: type, name: str) -> bool:
    """Whether `policy` has another `name` than `base`."""
    return getattr(policy, name, None) is not getattr(base, name, None)
