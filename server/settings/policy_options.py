# SPDX-License-Identifier: Apache-2.0
"""Options of policies in flags, environment and files: ``policy.option``, and ``policy_options``.

A policy's options are found through its class (`tandemkv.cache_rank.policies.registry`), which is
loaded when an option is read and not before.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

from .yaml_text import RepeatedKeyError, load_yaml

GROUP = "policy_options"
"""Of settings files and the environment; below it the policy, and below that the option."""


class OptionName(NamedTuple):
    """An option of a policy."""

    policy: str
    option: str

    @property
    def key(self) -> str:
        """Its dotted name among the settings."""
        return f"{GROUP}.{self.policy}.{self.option}"


def split_option(name: str) -> OptionName | None:
    """Return the option that ``policy.option`` names; None if that names none.

    A policy is known by the registry, or written as ``module:Class``; whether it has such an
    option is for `collect_options` to say.
    """
    from tandemkv.cache_rank.policies.registry import POLICIES

    policy, _, option = name.removeprefix(f"{GROUP}.").rpartition(".")
    if policy in POLICIES or ":" in policy:
        return OptionName(policy, option)
    return None


def require_option_name(name: str, source: str) -> OptionName:
    """Return the option that a key below ``policy_options`` names.

    Raises `SettingsError` if there is no such policy; with the one that may be meant.
    """
    from tandemkv.cache_rank.policies.registry import POLICIES

    found = split_option(name)
    if found is not None:
        return found
    short = name.removeprefix(f"{GROUP}.")
    policy = short.rpartition(".")[0] or short
    near = difflib.get_close_matches(policy, POLICIES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(POLICIES))}"
    raise SettingsError(
        f"{short} (from {source}): policy.option is required, and {policy} is no policy; {hint}"
    )


def options_in(value: Any, source: str) -> dict[str, Any]:
    """Return the options of a mapping ``{policy: {option: value}}`` by their dotted names.

    `value` is what a file has below ``policy_options``; as text, as in the environment, YAML of it.
    Errors name `source`. Raises `SettingsError` if it is something else, or a policy is unknown.
    """
    required = f"{GROUP} (from {source}): a mapping is required: {{policy: {{option: value}}}}"
    if isinstance(value, str):
        try:
            value = load_yaml(value)
        except RepeatedKeyError as error:
            raise SettingsError(f"{GROUP} (from {source}): {error}") from error
        except yaml.YAMLError as error:
            raise SettingsError(required) from error
    if not isinstance(value, Mapping):
        raise SettingsError(required)
    found: dict[str, Any] = {}
    for policy, options in value.items():
        if not isinstance(options, Mapping):
            raise SettingsError(required)
        for option, chosen in options.items():
            found[require_option_name(f"{policy}.{option}", source).key] = chosen
    return found


def collect_options(
    given: Mapping[str, tuple[Any, str]],
    policy: str,
    *,
    optional: Mapping[str, tuple[Any, str]] | None = None,
) -> dict[str, Any]:
    """Check what was given of options, and return the values by option.

    Texts in `given` are read as a command line's. `optional` is what a file gave: it may hold
    options of several policies, of which one is chosen. Raises `SettingsError`, naming option,
    policy, source and what is allowed; or if it is another policy's.
    """
    from tandemkv.cache_rank.policies.options import PolicyError, parse_option, read_options
    from tandemkv.cache_rank.policies.registry import find_policy

    found: dict[str, Any] = {}
    for key, (value, source) in given.items():
        name = require_option_name(key, source)
        try:
            model = find_policy(name.policy).options_model
            if isinstance(value, str):
                value = parse_option(model, name.policy, name.option, value)
            else:
                read_options(model, name.policy, {name.option: value})
        except PolicyError as error:
            raise SettingsError(f"{error} (from {source})") from error
        if name.policy == policy:
            found[name.option] = value
        elif (optional or {}).get(key) != given[key]:
            raise SettingsError(
                f"{name.policy}.{name.option} (from {source}) is an option of policy "
                f"{name.policy}, and policy={policy} is chosen; add --policy {name.policy}, or "
                "leave the option out"
            )
    return found


def option_names() -> list[str]:
    """Return ``policy.option`` of all policies that the registry knows."""
    from tandemkv.cache_rank.policies.registry import POLICIES, find_policy

    models = {name: find_policy(name).options_model for name in POLICIES}
    return [f"{name}.{option}" for name, model in models.items() for option in model.model_fields]


def options_tree(selection: SelectionSettings) -> dict[str, dict[str, Any]]:
    """Return all options of the policy that is chosen, as a settings file has them."""
    from tandemkv.cache_rank.policies.registry import find_policy, options_of

    values = options_of(find_policy(selection.policy), selection).model_dump(mode="json")
    return {selection.policy: values} if values else {}
