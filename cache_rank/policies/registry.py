# SPDX-License-Identifier: Apache-2.0
"""Find a policy by its name, or by the dotted path of a user's own class."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tandemkv.cache_rank.protocol.settings.declared import DeclaredPolicy
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    DEFAULT_POLICY,
    SelectionSettings,
)

from .base import Policy, PolicyError, ScoringPolicy
from .composition import check_class, is_captured
from .options import PolicyOptions, check_options_model, read_options

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

    Raises `PolicyError` if there is no such policy, or it is not a `Policy` with declared
    capabilities.
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
        is_unseen = isinstance(error, ModuleNotFoundError) and error.name == module_name
        remedy = "; put its folder into PYTHONPATH" if is_unseen else ""
        raise PolicyError(f"policy={name!r} cannot be loaded: {error}{remedy}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise PolicyError(f"policy={name!r} must be a subclass of {_HERE}.base.Policy")
    if not hasattr(found, "capabilities"):
        raise PolicyError(f"policy={name!r} declares no `capabilities`")
    check_class(found, name)
    check_options_model(found.options_model, name)
    return found


def check_pooling(policy: type[Policy], selection: SelectionSettings) -> None:
    """Refuse ``pool_before`` and ``pool_after`` where a policy does not rank tokens by scores.

    Raises `PolicyError`, saying which do.
    """
    before, after = selection.pooled_positions
    if (before or after) and not _pools(policy):
        known = ", ".join(name for name in sorted(POLICIES) if _pools(find_policy(name)))
        raise PolicyError(
            f"pool_before={before}, pool_after={after}: policy={selection.policy} does not rank "
            f"tokens by pooled scores; leave them out, or use one of {known}"
        )


def unread_settings(
    policy: type[Policy], values: Mapping[str, Any], *, share_layers: bool
) -> dict[str, str]:
    """Return which of `values` say something that a policy never reads, and why not, by name."""
    says = policy.capabilities
    why = {}
    if says.calibration == "sync_kv":
        why = dict.fromkeys(("anchors", "share_layers"), "shares selections over heads, not layers")
    elif says.calibration is None and (not says.selects or says.attends):
        names = ("share_layers", "anchors", "calibration")
        why = dict.fromkeys(names, "has no selections that layers could share")
    elif says.calibration is None and not share_layers:
        why["calibration"] = "reads no calibration without --share-layers"
        why["anchors"] = "has no anchor layers without --share-layers"
    if not says.selects or says.attends:
        why["fetch_cap"] = "fetches nothing"
    if not says.selects:
        why["refresh_every"] = "selects nothing"
        why["seed_window"] = "seeds nothing from a prompt"
    elif says.has_slow_steps:
        why["refresh_every"] = "selects in its slow steps, for which it has an option of its own"
    if not says.selects or says.attends:
        why["resident_factor"] = "has nothing but the sink resident"
    if not says.selects:
        why["pooling"] = "scores nothing"
    elif says.attends and policy.__module__.startswith(f"{_HERE}."):  # a user's own may read it
        why["pooling"] = "always takes the mean over the query heads of a group"
    if not says.selects or says.attends or says.index != "keys":
        why["index_dtype"] = "scans no index of keys"
    nothing: dict[str, tuple[Any, ...]] = {"refresh_every": (None, 1), "anchors": ((), [])}
    if not says.attends:  # without an index pages have more tokens by int4 all the same
        nothing["index_dtype"] = ("native", "int4")
    defaults = SelectionSettings()
    return {
        name: text
        for name, text in why.items()
        if name in values and values[name] not in nothing.get(name, (getattr(defaults, name),))
    }


def check_read(policy: type[Policy], selection: SelectionSettings) -> None:
    """Refuse settings that the policy never reads: who gives one waits for what it does.

    Raises `PolicyError`, naming the first.
    """
    values = {name: getattr(selection, name) for name in SelectionSettings.model_fields}
    unread = unread_settings(policy, values, share_layers=selection.share_layers)
    for name, why in unread.items():
        value = values[name]
        text = ",".join(map(str, value)) if isinstance(value, tuple) else value
        raise PolicyError(
            f"{name}={text}: policy={selection.policy} {why}; drop --{name.replace('_', '-')}, or "
            "take another --policy"
        )


def read_by(
    policy: str, of_all: Mapping[str, Any], own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Join settings for several policies with a policy's `own`; without those it never reads.

    `own` are kept whatever they are. Raises `PolicyError` if there is no such policy.
    """
    joined = {**of_all, **(own or {})}
    shares = bool(joined.get("share_layers"))
    unread = unread_settings(find_policy(policy), of_all, share_layers=shares)
    return {name: x for name, x in joined.items() if name not in unread or name in (own or {})}


def _pools(policy: type[Policy]) -> bool:
    is_own = getattr(policy, "select", None) is not ScoringPolicy.select
    return policy.pools_positions and (not is_own or "pools_positions" in vars(policy))


def resolve_selection(selection: SelectionSettings | Mapping[str, Any]) -> SelectionSettings:
    """Check the policy's options and enter what it declares; defaults of settings depend on it.

    Whatever `selection`, settings or values of which to make them, says of a declaration is
    replaced.

    Raises
    ------
    PolicyError
        If there is no such policy, or not with these options.
    ValueError
        If the settings do not go together (pydantic's).
    """
    return SelectionSettings.model_validate(selection_values(selection))


def selection_values(selection: SelectionSettings | Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of which `resolve_selection` makes settings, to be validated elsewhere.

    Raises `PolicyError` if there is no such policy, or not with these options.
    """
    if isinstance(selection, SelectionSettings):
        selection = selection.model_dump(exclude_unset=True)
    values = dict(selection)
    name = str(values.get("policy", DEFAULT_POLICY))
    found = find_policy(name)
    options = read_options(found.options_model, name, values.get("options") or {})
    return values | {
        "options": options.model_dump(exclude_defaults=True),
        "declared": _declared(found, options),
    }


def _declared(policy: type[Policy], options: PolicyOptions) -> DeclaredPolicy:
    """Return what a policy declares with `options`."""
    declared = options.declare(policy.capabilities)
    return declared.model_copy(update={"is_captured": is_captured(policy)})


def options_of(policy: type[Policy], selection: SelectionSettings) -> PolicyOptions:
    """Return the options that a policy is built with.

    Raises `PolicyError` if the settings have others than the policy.
    """
    return read_options(policy.options_model, selection.policy, selection.options)


def check_resolved(policy: type[Policy], selection: SelectionSettings) -> None:
    """Refuse settings that were made without asking the policy's class.

    Raises `PolicyError` if they were.
    """
    declared = _declared(policy, options_of(policy, selection))
    if selection.declared != declared:
        raise PolicyError(
            f"policy={selection.policy}: the settings were made for another declaration "
            f"({selection.declared}) than that of {policy.__name__} ({declared}); make them with "
            "resolve_selection"
        )
