# SPDX-License-Identifier: Apache-2.0
"""JSON schemas, expressions and tools: what is costly or deadly to read, whatever its length.

xgrammar compiles in SGLang's scheduler and calls itself for each level: a pattern of 30,000
parentheses overflows its stack, and a schema of some hundred levels takes minutes. SGLang checks
tools in Python, each of their values, and the members of a list that it cannot sort in pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .body import parse_json_object
from .limits import Limits
from .refusal import RequestRefusedError
from .values import fault, list_of, mapping, string, wrong

MOST_GROUPS = 512
"""Opening parentheses of one regular expression: no fewer than its levels, escaped or not."""
MOST_TOOL_GROUPS = 128
"""The same in tools, whose expressions SGLang has compiled by Python, which calls itself too."""
_LONG_NUMBER = re.compile(r"\{(?:[0-9]*,)?[0-9]{7}")
"""A repetition that Python refuses with an error of its own, which SGLang answers with 500."""
MOST_TOOL_VALUES, _MOST_IN_PAIRS, _MOST_TOOLS = 8192, 256, 256
_ANY_JSON = "$$ANY$$"  # SGLang's own word

_text, _mapping = string(Limits.grammar_bytes), mapping(Limits.grammar_bytes)
_mappings = list_of(_mapping, _MOST_TOOLS)


def regex(name: str, value: Any, limits: Limits) -> None:
    """Check a regular expression."""
    _text(name, value, limits)
    _check_groups(name, value)


def json_schema(name: str, value: Any, limits: Limits) -> None:
    """Check a JSON schema that comes as text, which the bound on a request's depth has not seen."""
    _text(name, value, limits)
    if value == _ANY_JSON:
        return
    try:
        found = parse_json_object(value.encode(), max_depth=limits.settings.max_json_depth)
    except RequestRefusedError as refusal:
        raise fault(name, f"{name}: {refusal.message}") from None
    _check_patterns(name, found)


def response_format(name: str, value: Any, limits: Limits) -> None:
    """Check what an answer must be like."""
    _mapping(name, value, limits)
    _check_patterns(name, value)
    inside, schema = f"{name}.schema", value.get("schema")  # SGLang takes it by this name as well
    if schema is None:
        return
    _mapping(inside, schema, limits)
    if "properties" in schema:  # SGLang looks into null, too
        _mapping(f"{inside}.properties", schema["properties"], limits)
        strict = schema["properties"].get("strict")
        if strict is not None:
            _mapping(f"{inside}.properties.strict", strict, limits)


def tools(name: str, value: Any, limits: Limits) -> None:
    """Check what a model may call."""
    _mappings(name, value, limits)
    for position, tool in enumerate(value):
        function = tool.get("function")
        parameters = function.get("parameters") if isinstance(function, dict) else None
        if parameters is not None:  # true and false are schemas, too, which SGLang fails at
            _mapping(f"{name}[{position}].function.parameters", parameters, limits)
    _check_patterns(name, value, MOST_TOOL_GROUPS)
    count = 0
    for item in _values(value):
        count += 1
        if isinstance(item, list) and len(item) > _MOST_IN_PAIRS and not _is_sortable(item):
            raise wrong(
                name, item, f"strings or numbers alone in a list of more than {_MOST_IN_PAIRS}"
            )
    if count > MOST_TOOL_VALUES:
        said = f"{name} have {count} JSON values; at most {MOST_TOOL_VALUES} are allowed"
        raise fault(name, said)


def _check_patterns(name: str, value: Any, most_groups: int = MOST_GROUPS) -> None:
    for item in _values(value):
        if isinstance(item, dict):
            for key, below in item.items():
                _check_groups(name, key, most_groups)  # of patternProperties
                if key == "pattern" and isinstance(below, str):
                    _check_groups(f"{name} pattern", below, most_groups)


def _check_groups(name: str, text: str, most: int = MOST_GROUPS) -> None:
    if text.count("(") > most:
        raise wrong(name, text, f"a regular expression with at most {most} parentheses")
    if _LONG_NUMBER.search(text):
        raise wrong(name, text, "a regular expression with repetitions of at most 6 digits")


def _is_sortable(items: list[Any]) -> bool:
    types = set(map(type, items))
    return types == {str} or types <= {int, float}


def _values(value: Any) -> Iterator[Any]:
    """Yield `value` and all that is in it."""
    left = [value]
    while left:
        item = left.pop()
        yield item
        if isinstance(item, dict):
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
