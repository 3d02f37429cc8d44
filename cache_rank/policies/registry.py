# SPDX-License-Identifier: Apache-2.0
"""Find a policy by its name, or by the dotted path of a user's own class."""

from __future__ import annotations

from importlib import import_module

from tandemkv.cache_rank.protocol.settings import SelectionSettings

from .base import Policy, PolicyContext, PolicyError, ScoringPolicy

_HERE = "tandemkv.cache_rank.policies"
POLICIES = {
    "look_ahead": f"{_HERE}.look_ahead:LookAheadPolicy",
    "async_spade": f"{_HERE}.async_spade:AsyncSpadePolicy",
    "last_query": f"{_HERE}.last_query:LastQueryPolicy",
    "mean_query": f"{_HERE}.mean_query:MeanQueryPolicy",
    "oracle": f"{_HERE}.oracle:OraclePolicy",
    "quest": f"{_HERE}.quest:QuestPolicy",
    "lfps": f"{_HERE}.lfps:LfpsPolicy",
    "kascade": f"{_HERE}.kascade:KascadePolicy",
    "sfi": f"{_HERE}.sfi:SFIPolicy",
    "sync_kv": f"{_HERE}.sync_kv:SyncKVPolicy",
    "streaming": f"{_HERE}.streaming:StreamingPolicy",
    "exact": f"{_HERE}.exact:ExactPolicy",
}


def find_policy(name: str) -> type[Policy]:
    """Return the class of the policy `name`, a key of `POLICIES` or ``module:Class``.

    Raises
    ------
    PolicyError
        If there is no such policy, or it is not a `Policy` with declared capabilities.
    """
    path = POLICIES.get(name, name)
    module_name, separator, class_name = path.partition(":")
    if not separator:
        raise PolicyError(
            f"policy={name!r} is unknown; known: {', '.join(sorted(POLICIES))}, "
            "or module:Class of your own"
        )
    try:
        found = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"policy={name!r} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise PolicyError(f"policy={name!r} must be a subclass of {_HERE}.base.Policy")
    if not hasattr(found, "capabilities"):
        raise PolicyError(f"policy={name!r} declares no `capabilities`")
    return found


def check_pooling(policy: type[Policy], selection: SelectionSettings) -> None:
    """Refuse ``pool_before`` and ``pool_after`` where a policy does not rank tokens by scores.

    Raises
    ------
    PolicyError
        Saying which do.
    """
    before, after = selection.pooled_positions
    if (before or after) and not _pools(policy):
        known = ", ".join(name for name in sorted(POLICIES) if _pools(find_policy(name)))
        raise PolicyError(
            f"pool_before={before}, pool_after={after}: policy={selection.policy} does not rank "
            f"tokens by pooled scores; leave them out, or use one of {known}"
        )


def _pools(policy: type[Policy]) -> bool:
    is_own = getattr(policy, "select", None) is not ScoringPolicy.select
    return policy.pools_positions and (not is_own or "pools_positions" in vars(policy))


def make_policy(name: str, context: PolicyContext) -> Policy:
    """Build the policy `name`.

    Raises
    ------
    PolicyError
        As `find_policy`; or if the class cannot be built.
    """
    return find_policy(name)(context)
