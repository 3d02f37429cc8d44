# SPDX-License-Identifier: Apache-2.0
"""Which servers are measured: policies times budgets, and dense."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from pydantic import ValidationError

from tandemkv.cache_rank.policies.options import parse_option
from tandemkv.cache_rank.policies.registry import find_policy, read_by, resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    SAMPLE_STEP,
    SelectionSettings,
    default_samples,
)
from tandemkv.server.evaluation.grid import explained

DENSE, ALL = "dense", "all"
_ATTENDS_TO_ALL = "everything is attended to"
System = Literal["tandemkv", "sglang", "kvpress"]
Scalar = str | int | float | bool | None
Setting = str | int | float | bool | list[int] | dict[str, Scalar | list[Scalar]] | None


class Configuration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server, or one setting of another system."""

    system: System
    policy: str
    """``sglang`` ``dense`` is stock SGLang."""
    budget: str
    """As given on the command line, ``all`` where everything is attended to."""
    attended_tokens: int | None
    """Tokens attended to per KV head and layer, in layers that are not exact; None for all."""
    num_layers: int
    remote_tokens: int = 0
    """Those of them, at most, that the cache rank attends to; the inference rank does not see
    them."""
    exact_layers: list[int] = []
    """Layers that attend to everything."""
    windowed_layers: list[int] = []
    """Those that do not attend to the whole context in stock SGLang either. They do not count."""
    selection: dict[str, Setting] = {}
    """Settings of the group ``selection``."""
    sees_question: str = ""
    """Whether what is attended to was chosen knowing the question."""
    variant: str = ""
    """Settings that tell this configuration from others of its policy and budget."""
    is_open: bool = False
    """Whether `serve` decides what is not in `selection`."""
    resolved: dict[str, Setting] = {}
    """Every setting that matters to a result, by name, after `serve` decided it."""

    @property
    def slug(self) -> str:
        """Name of its folder."""
        parts = (self.system, self.policy, self.variant, self.budget)
        name = "-".join(part for part in parts if part).replace("%", "pc")
        return re.sub(r"[^A-Za-z0-9.]+", "-", name)

    @property
    def is_dense(self) -> bool:
        """Whether it is the reference."""
        return self.system == "sglang" and self.policy == DENSE

    @property
    def num_selecting(self) -> int:
        """Layers that do not attend to everything, windowed ones aside."""
        return self.num_layers - len({*self.exact_layers, *self.windowed_layers})

    def attended_share(self, share_elsewhere: float) -> float:
        """Share over all layers that have no window, given that of `num_selecting`."""
        num_layers = self.num_layers - len(self.windowed_layers)
        return 1.0 - self.num_selecting * (1.0 - share_elsewhere) / num_layers


class Budget(NamedTuple):
    """Tokens attended to per KV head, as a number or a share of the context."""

    text: str
    tokens: int


def parse_budgets(texts: Sequence[str], contexts: Sequence[int]) -> list[Budget]:
    """Read ``12.5%`` (of the context) and ``1092`` (tokens).

    `contexts` are the lengths at which tasks are asked. Raises `SettingsError` if a text is
    neither, is not below the shortest of them, or is a share of several.
    """
    context_tokens = min(contexts)
    found = []
    for text in texts:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
        if match is None:
            raise SettingsError(
                f"budget={text}: a number of tokens (1092) or a share of the context (12.5%) is "
                "required"
            )
        if match[2] and len(contexts) > 1:
            raise SettingsError(
                f"budget={text}: a share of which context? Give tokens, e.g. 2180, or one "
                "--context-tokens and no task with another"
            )
        number = float(match[1])
        tokens = int(number / 100 * context_tokens if match[2] else number)
        if not 0 < tokens < context_tokens:
            raise SettingsError(
                f"budget={text}: {tokens} tokens of a context of {context_tokens}; it must be "
                "more than none and less than all"
            )
        found.append(Budget(text.strip(), tokens))
    return found


def plan(
    policies: Sequence[str],
    budgets: Sequence[Budget],
    *,
    num_layers: int,
    device: str,
    base: Mapping[str, object],
    with_dense: bool = True,
) -> list[Configuration]:
    """Return dense and every policy at every budget; a policy without budgets comes once.

    `policies` are names in the registry, or ``module:Class``; settings of the group ``selection``
    and options of the policy, for this one alone, follow after a plus sign each:
    ``look_ahead+fetch_cap=64+distance=2``. `base` are settings of that group that the user gave;
    those that a policy never reads are for the others.
    Raises `SettingsError` if a policy is unknown, cannot run here, or a budget is too small for it.
    """
    found = [dense_of(num_layers)] if with_dense else []
    for text in policies:
        if text == DENSE:
            continue
        policy, own = _split(text)
        declared = find_policy(policy).capabilities
        devices = declared.devices
        # One that attends does so on the host's CPU, wherever the model is.
        if device not in devices and not (declared.attends and "cpu" in devices):
            raise SettingsError(
                f"policy={policy} declares devices {', '.join(devices)}, not {device}; leave it "
                "out or choose another --device"
            )
        values = read_by(policy, base, _with_options(policy, own))
        added = _of_policy(policy, budgets, num_layers, values)
        variant = ", ".join(f"{key}={value}" for key, value in own.items())
        found += [msgspec.structs.replace(item, variant=variant) for item in added]
    slugs = [item.slug for item in found]
    twice = sorted({slug for slug in slugs if slugs.count(slug) > 1})
    if twice:
        raise SettingsError(f"given twice: {', '.join(twice)}; give each policy and budget once")
    return found


def dense_of(num_layers: int) -> Configuration:
    """Return what others are compared with."""
    return Configuration(
        system="sglang",
        policy=DENSE,
        budget=ALL,
        attended_tokens=None,
        num_layers=num_layers,
        sees_question=_ATTENDS_TO_ALL,
    )


def configuration_of(
    settings: SelectionSettings, budget: str, num_layers: int, **more: Any
) -> Configuration:
    """Return the configuration of decided settings; `more` are fields that they do not tell."""
    declared = find_policy(settings.policy).capabilities
    remote = settings.budget_tokens if declared.timing is Timing.SAME_STEP_ATTENTION else 0
    layers = set(range(num_layers))
    exact = layers if declared.all_exact else layers & set(settings.exact_layer_ids)
    sees = "chosen anew in decode" if declared.selects else "no: by position, whatever is asked"
    return Configuration(
        system="tandemkv",
        policy=settings.policy,
        budget=budget,
        attended_tokens=None if declared.all_exact else settings.row_tokens + remote,
        remote_tokens=remote,
        num_layers=num_layers,
        exact_layers=sorted(exact),
        sees_question=_ATTENDS_TO_ALL if declared.all_exact else sees,
        **more,
    )


def _split(text: str) -> tuple[str, dict[str, str]]:
    """Separate a policy from the settings that follow it."""
    policy, *parts = text.split("+")
    own: dict[str, str] = {}
    for part in parts:
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or key in ("policy", "budget_tokens", "exact_layers"):
            raise SettingsError(
                f"policies={text}: after a plus sign, a setting of the group selection or an "
                "option of the policy is required (look_ahead+fetch_cap=64); not policy, "
                "budget_tokens or exact_layers"
            )
        own[key] = value
    return policy.strip(), own


def _with_options(policy: str, own: Mapping[str, str]) -> dict[str, object]:
    """Return settings of one configuration, with the policy's options as their own mapping."""
    model = find_policy(policy).options_model
    options = {
        name: parse_option(model, policy, name, text)
        for name, text in own.items()
        if name in model.model_fields and name not in SelectionSettings.model_fields
    }
    settings: dict[str, object] = {k: text for k, text in own.items() if k not in options}
    return settings | ({"options": options} if options else {})


def _of_policy(
    policy: str, budgets: Sequence[Budget], num_layers: int, base: Mapping[str, object]
) -> list[Configuration]:
    if find_policy(policy).capabilities.all_exact:
        settings = _settings(policy, base)
        return [configuration_of(settings, ALL, num_layers, selection=_given(settings))]
    if not budgets:
        raise SettingsError(f"policy={policy} needs a budget: --budgets 12.5% or --budgets 512")
    _check_names(policy, base)
    return [_sparse(policy, budget, num_layers, base) for budget in budgets]


def _check_names(policy: str, base: Mapping[str, object]) -> None:
    """Refuse what is no setting of the group ``selection``."""
    for name in sorted(base.keys() - SelectionSettings.model_fields.keys()):
        names = [*SelectionSettings.model_fields, *find_policy(policy).options_model.model_fields]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        raise SettingsError(
            f"policy={policy}: no setting {name} of selection, and no such option of this policy; "
            + (f"did you mean {near[0]}?" if near else "`tandemkv serve --print-settings` has all")
        )


def _sparse(
    policy: str, budget: Budget, num_layers: int, base: Mapping[str, object]
) -> Configuration:
    """Find the settings whose attended tokens come closest to the budget from below.

    What is attended to is resident: sink + c * K + ring + samples. A policy that attends on the
    cache rank has sink and ring resident, and K there. One that selects nothing gets the whole
    budget as its ring.
    """
    given = {**SelectionSettings().model_dump(), **base}
    sink, recent = int(given["num_sink_tokens"]), int(given["num_recent_tokens"])
    capabilities = find_policy(policy).capabilities
    is_remote = capabilities.timing is Timing.SAME_STEP_ATTENTION
    factor = 1.0 if is_remote else float(given["resident_factor"])
    added: dict[str, object] = {"num_recent_tokens": budget.tokens - sink}
    samples = 0
    if capabilities.selects:
        added, samples = _divide(policy, budget.tokens - sink - recent, factor, base)
    try:
        settings = _settings(policy, {**base, **added})
    except SettingsError as error:
        raise SettingsError(
            f"budget={budget.text} ({budget.tokens} tokens) is not possible for policy={policy} "
            f"with num_sink_tokens={sink}, num_recent_tokens={recent}, sample_tokens={samples}, "
            f"resident_factor={factor:g}: {error}; where it is too small, --set "
            "selection.num_recent_tokens=16 makes room"
        ) from error
    found = configuration_of(settings, budget.text, num_layers, selection=_given(settings))
    if (found.attended_tokens or 0) > budget.tokens:
        raise SettingsError(
            f"policy={policy} attends to {found.attended_tokens} tokens with budget={budget.text}; "
            "its budget cannot be set from here"
        )
    return found


def _divide(
    policy: str, tokens: int, factor: float, base: Mapping[str, object]
) -> tuple[dict[str, object], int]:
    """Divide `tokens` between c * K and samples; return what to set, and the samples.

    Where nothing else is asked for there are as many samples as a server of this K has.
    """
    if base.get("sample_tokens") is not None:
        samples = int(str(base["sample_tokens"]))
        return {"budget_tokens": int((tokens - samples) / factor)}, samples
    most = find_policy(policy).capabilities.default_samples
    if not most:
        return {"budget_tokens": int(tokens / factor)}, 0
    for samples in range(most, -1, -SAMPLE_STEP):
        selected = int((tokens - samples) / factor)
        if default_samples(most, selected) >= samples:
            break
    return {"budget_tokens": selected, "sample_tokens": samples}, samples


def _settings(policy: str, values: Mapping[str, object]) -> SelectionSettings:
    try:
        return resolve_selection({**values, "policy": policy})
    except ValidationError as error:
        raise SettingsError(explained(error, "selection")) from error


def _given(settings: SelectionSettings) -> dict[str, Setting]:
    """Return what differs from the defaults, and what the report names."""
    named = {"policy", "budget_tokens", "resident_factor", "num_sink_tokens", "num_recent_tokens"}
    defaults = SelectionSettings()
    return {
        key: value
        for key, value in settings.model_dump(mode="json").items()
        if key in named or (key != "declared" and getattr(settings, key) != getattr(defaults, key))
    }
