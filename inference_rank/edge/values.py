# SPDX-License-Identifier: Apache-2.0
"""Checks of single values. Each takes (name, value, limits) and raises `RequestRefusedError`.

Types are exact: SGLang would read the text "20000" as a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .limits import Limits
from .refusal import RequestRefusedError, shown

Check = Callable[[str, Any, Limits], None]
Bound = int | Callable[[Limits], int]


def fault(name: str, message: str, code: str | None = "invalid_value") -> RequestRefusedError:
    """Return the refusal of a request for its field `name`."""
    return RequestRefusedError(400, message, param=name, code=code)


def wrong(name: str, value: object, required: str) -> RequestRefusedError:
    """Return the refusal of one value."""
    return fault(name, f"{name}={shown(value)}: {required} is required")


def resolved(bound: Bound, limits: Limits) -> int:
    """Return a bound that may depend on the limits."""
    return bound(limits) if callable(bound) else bound


def integer(least: Bound, most: Bound, *, also: tuple[int, ...] = ()) -> Check:
    """Return the check of an integer from `least` to `most`, or one of `also`."""

    def check(name: str, value: Any, limits: Limits) -> None:
        low, high = resolved(least, limits), resolved(most, limits)
        if type(value) is int and (low <= value <= high or value in also):
            return
        others = "".join(f", or {item}" for item in also)
        raise wrong(name, value, f"an integer from {low} to {high}{others}")

    return check


def number(least: float, most: float, *, above: bool = False) -> Check:
    """Return the check of a number from `least` (or `above` it) to `most`."""

    def check(name: str, value: Any, _limits: Limits) -> None:
        # Compared alone, which no integer is too long for; NaN is within no bounds.
        is_low_enough = type(value) in (int, float) and value <= most
        if is_low_enough and (value > least if above else value >= least):
            return
        raise wrong(name, value, f"a number {'above' if above else 'from'} {least:g} to {most:g}")

    return check


def boolean(name: str, value: Any, _limits: Limits) -> None:
    """Require true or false."""
    if type(value) is not bool:
        raise wrong(name, value, "true or false")


def only(*allowed: Any) -> Check:
    """Return the check of a value that must be one of `allowed`, of the same type."""

    def check(name: str, value: Any, _limits: Limits) -> None:
        if not any(type(value) is type(item) and value == item for item in allowed):
            raise wrong(name, value, " or ".join(shown(item) for item in allowed))

    return check


def string(most: Bound, *, pattern: str | None = None, least: int = 0) -> Check:
    """Return the check of a string of at most `most` bytes in UTF-8."""
    compiled = None if pattern is None else re.compile(pattern)

    def check(name: str, value: Any, limits: Limits) -> None:
        high = resolved(most, limits)
        if type(value) is not str:
            raise wrong(name, value, "a string")
        length = text_bytes(value)
        if not least <= length <= high:
            said = f"{name} has {length} bytes; {least} to {high} are allowed"
            raise fault(name, said, "string_above_max_length" if length > high else "invalid_value")
        if compiled is not None and not compiled.fullmatch(value):
            raise wrong(name, value, f"a string like {pattern}")

    return check


def text_bytes(text: str) -> int:
    """Return how many bytes of UTF-8 `text` has."""
    return len(text) if text.isascii() else len(text.encode())


def one_or_list(item: Check, most: Bound, *, least: int = 1) -> Check:
    """Return the check of one value, or a list of `least` to `most`."""
    several = list_of(item, most, least=least)

    def check(name: str, value: Any, limits: Limits) -> None:
        (several if isinstance(value, list) else item)(name, value, limits)

    return check


def list_of(item: Check, most: Bound, *, least: int = 0) -> Check:
    """Return the check of a list of `least` to `most` values."""

    def check(name: str, value: Any, limits: Limits) -> None:
        high = resolved(most, limits)
        if type(value) is not list or not least <= len(value) <= high:
            raise wrong(name, value, f"a list of {least} to {high}")
        for position, part in enumerate(value):
            item(f"{name}[{position}]", part, limits)

    return check


def token_ids(name: str, value: Any, limits: Limits) -> None:
    """Require a list of token ids; empty is for others to judge. Fast: prompts are long."""
    if type(value) is not list:
        raise wrong(name, value, "a list of token ids")
    if len(value) > limits.context_tokens:
        said = f"{name} has {len(value)} tokens; the model's context has {limits.context_tokens}"
        raise fault(name, said, "context_length_exceeded")
    if not value:
        raise wrong(name, value, "at least one token id")
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < limits.vocab_size:
        return
    check = integer(0, limits.vocab_size - 1)
    for position, item in enumerate(value):
        check(f"{name}[{position}]", item, limits)


def logit_bias(name: str, value: Any, limits: Limits) -> None:
    """Require a mapping of token ids, written as strings, to numbers from -100 to 100."""
    if type(value) is not dict or len(value) > 1024:
        raise wrong(name, value, "a mapping of at most 1024 token ids")
    check = number(-100, 100)
    for key, bias in value.items():
        is_id = re.fullmatch(r"0|[1-9][0-9]{0,18}", key, re.ASCII) is not None
        if not is_id or int(key) >= limits.vocab_size:
            raise wrong(f"{name} key", key, f"a token id from 0 to {limits.vocab_size - 1}")
        check(f"{name}[{key}]", bias, limits)


def mapping(most: Bound, fields: Mapping[str, Check] | None = None) -> Check:
    """Return the check of a mapping of at most `most` bytes as JSON, maybe of `fields` alone."""

    def check(name: str, value: Any, limits: Limits) -> None:
        if type(value) is not dict:
            raise wrong(name, value, "a mapping")
        length, high = json_bytes(value), resolved(most, limits)
        if length > high:
            said = f"{name} has {length} bytes as JSON; at most {high} are allowed"
            raise fault(name, said, code=None)
        if fields is not None:
            check_fields(value, fields, limits, prefix=f"{name}.")

    return check


def json_bytes(value: Any) -> int:
    """Return the length of `value` as JSON."""
    return len(msgspec.json.encode(value))


def check_fields(
    found: dict[str, Any], fields: Mapping[str, Check], limits: Limits, *, prefix: str = ""
) -> None:
    """Check every field; drop what is null, which is to say left open.

    Raises `RequestRefusedError`: 400 if a field is unknown or its value wrong.
    """
    for name in [name for name, value in found.items() if value is None]:
        del found[name]
    for name, value in found.items():
        check = fields.get(name)
        if check is None:
            full = f"{prefix}{name}"[:80]
            said = "this server has no such field on this route, or does not allow it; remove it"
            raise fault(full, f"{full}: {said}", "unknown_parameter")
        check(f"{prefix}{name}", value, limits)
