# SPDX-License-Identifier: Apache-2.0
"""Options that one policy reads: the base of their models, and how they are read and shown.

A policy's file holds its model, and the class names it (`Policy.options_model`). Settings carry
the values as a mapping by name (`SelectionSettings.options`), which both processes have checked
by this module before a policy is built.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.declared import DeclaredPolicy
from tandemkv.cache_rank.protocol.settings.frozen_model import required_type
from tandemkv.cache_rank.protocol.settings.rank_settings import OptionValues

if TYPE_CHECKING:
    from .base import PolicyCapabilities

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_LEAST = {"ge": "at least {}", "gt": "more than {}"}
_MOST = {"le": "at most {}", "lt": "less than {}"}


class PolicyError(SettingsError):
    """A policy is unknown, cannot be built, or answered with something else than it must."""


class PolicyOptions(BaseModel):
    """Options of a policy, none by default. Each field has a default and a description.

    Values are finite numbers, texts, booleans, None, or tuples of these. Both processes are told
    them as JSON, which has no other numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def declare(self, capabilities: PolicyCapabilities) -> DeclaredPolicy:
        """Return what the inference rank has to know of a policy with these options."""
        return capabilities.declare()

    def reads_rotary(self, capabilities: PolicyCapabilities) -> bool:
        """Whether the policy is to be built with the model's rotary embedding."""
        return capabilities.wants_query_window


class OptionText(NamedTuple):
    """An option as it is shown: its name, what it accepts, its default and its description."""

    name: str
    accepted: str
    default: str
    help: str


def check_options_model(model: type[PolicyOptions], name: str) -> None:
    """Refuse a model whose values settings could not carry; `name` is the policy's.

    Raises `PolicyError`, saying which option it is.
    """
    if not (isinstance(model, type) and issubclass(model, PolicyOptions)):
        raise PolicyError(f"policy={name}: options_model must be a subclass of PolicyOptions")
    for option, field in model.model_fields.items():
        if _NAME.fullmatch(option) is None:
            raise PolicyError(f"policy={name}: option {option} must be in lower case")
        if field.get_default(call_default_factory=False) is PydanticUndefined:
            raise PolicyError(f"policy={name}: option {option} needs a default")
    try:
        TypeAdapter(OptionValues).validate_python(model().model_dump())
    except ValidationError as error:
        raise PolicyError(
            f"policy={name}: settings cannot carry the default of option "
            f"{error.errors()[0]['loc'][0]}; use a number, a text, a boolean, or a tuple of these"
        ) from error


def read_options(model: type[PolicyOptions], name: str, values: Mapping[str, Any]) -> PolicyOptions:
    """Check `values` of the options of the policy `name`.

    Raises `PolicyError`, naming the policy, the option and what is allowed.
    """
    for option in values:
        require_option(model, name, option)
    try:
        lists = {key: tuple(x) if isinstance(x, list) else x for key, x in values.items()}
        return model.model_validate(lists)
    except ValidationError as error:
        raise PolicyError("; ".join(_explain(model, name, error))) from error


def require_option(model: type[PolicyOptions], name: str, option: str) -> None:
    """Refuse what is no option of the policy `name`.

    Raises `PolicyError`, with the option that may be meant, or all that there are.
    """
    known = list(model.model_fields)
    if option in known:
        return
    if not known:
        raise PolicyError(f"{name}.{option}: policy={name} has no options")
    near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
    hint = f"did you mean {name}.{near[0]}?" if near else f"it has: {', '.join(known)}"
    raise PolicyError(f"{name}.{option}: policy={name} has no such option; {hint}")


def parse_option(model: type[PolicyOptions], name: str, option: str, text: str) -> Any:
    """Return the value of an option that was given as text, as on a command line.

    ``none`` is None where the default is, and a tuple is written with commas. Raises `PolicyError`
    if there is no such option, or the text is no value of it.
    """
    require_option(model, name, option)
    field = model.model_fields[option]
    hint, value = required_type(field.annotation), text.strip()
    if value.lower() == "none" and field.default is None:
        return None
    given: Any = text
    if typing.get_origin(hint) is tuple:
        given = () if value.lower() in ("none", "") else [x.strip() for x in value.split(",")]
    elif typing.get_origin(hint) is Literal:
        given = {str(choice): choice for choice in typing.get_args(hint)}.get(value, text)
    try:
        return getattr(model.model_validate({option: given}, strict=False), option)
    except ValidationError as error:
        raise PolicyError("; ".join(_explain(model, name, error))) from error


def describe_options(model: type[PolicyOptions]) -> list[OptionText]:
    """Return the options of a model in their order, as texts."""
    return [
        OptionText(option, _accepted(field), _as_text(field.default), field.description or "")
        for option, field in model.model_fields.items()
    ]


def _explain(model: type[PolicyOptions], name: str, error: ValidationError) -> list[str]:
    """One text per wrong option: its value, what is wrong and what is accepted."""
    texts = []
    for item in error.errors(include_url=False):
        message = item["msg"].removeprefix("Value error, ")
        option = str(item["loc"][0]) if item["loc"] else ""
        if option not in model.model_fields:  # a check over several options
            texts.append(f"options of policy={name}: {message}")
            continue
        field = model.model_fields[option]
        texts.append(
            f"{name}.{option}={item['input']}: {message[:1].lower()}{message[1:]}; accepted: "
            f"{_accepted(field)} (default {_as_text(field.default)})"
        )
    return list(dict.fromkeys(texts))


def _accepted(field: FieldInfo) -> str:
    """Say in a few words which values a field takes."""
    hint = required_type(field.annotation)
    if typing.get_origin(hint) is Literal:
        return "|".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "a list: A,B or none"
    words = {int: "integer", float: "number", bool: "true|false", str: "text"}
    text = words.get(hint, "value")
    if hint in (int, float):
        text = " ".join([text, *_bounds(field)])
    return text


def _bounds(field: FieldInfo) -> list[str]:
    found: dict[str, Any] = {}
    for item in field.metadata:
        found |= {k: getattr(item, k) for k in (*_LEAST, *_MOST) if hasattr(item, k)}
    if {"ge", "le"} <= found.keys():
        return [f"{found['ge']:g} to {found['le']:g}"]
    bounds = [text.format(f"{found[k]:g}") for k, text in (_LEAST | _MOST).items() if k in found]
    return [", ".join(bounds)] if bounds else []


def _as_text(value: Any) -> str:
    """Return a default as it would be written on a command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) and not value.isidentifier() else str(value)
