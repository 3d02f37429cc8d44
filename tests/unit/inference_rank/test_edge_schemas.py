# SPDX-License-Identifier: Apache-2.0
"""Schemas, expressions and tools that ended SGLang's scheduler, or stalled its HTTP process."""

from __future__ import annotations

import json
from typing import Any

import pytest
from edge_world import CHAT, COMPLETIONS, NATIVE, make_world

from tandemkv.inference_rank.edge.schemas import MOST_GROUPS, MOST_TOOL_VALUES

MESSAGES = [{"role": "user", "content": "hi"}]
DEEP = "(" * 1000 + "a" + ")" * 1000
NESTED = '{"items":' * 400 + "{}" + "}" * 400


def with_format(schema: dict[str, Any]) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": MESSAGES, "response_format": wanted}


def as_format(schema: object) -> dict[str, Any]:
    return {"messages": MESSAGES, "response_format": {"type": "json_schema", "schema": schema}}


def with_tool(parameters: object) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {"messages": MESSAGES, "tools": [tool]}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "x", "regex": DEEP}, "at most 512 parentheses"),
    (NATIVE, {"text": "x", "sampling_params": {"regex": DEEP}}, "at most 512 parentheses"),
    (
        COMPLETIONS,
        {"prompt": "x", "json_schema": json.dumps({"items": {"pattern": DEEP}})},
        "at most 512 parentheses",
    ),
    (COMPLETIONS, {"prompt": "x", "json_schema": NESTED}, "nested more than 32 deep"),
    (COMPLETIONS, {"prompt": "x", "json_schema": "{"}, "json_schema: the body is not valid JSON"),
    (CHAT, with_format({"properties": {"a": {"pattern": DEEP}}}), "at most 512 parentheses"),
    (CHAT, with_format({"patternProperties": {DEEP: {}}}), "at most 512 parentheses"),
    (CHAT, with_tool({"items": {"pattern": DEEP}}), "at most 128 parentheses"),
    (CHAT, with_tool({"pattern": "(" * 129 + ")" * 129}), "at most 128 parentheses"),
    (CHAT, with_tool({"pattern": "a{99999999999999999999}"}), "at most 6 digits"),
    (CHAT, with_tool({"patternProperties": {"a{0,10000000}": {}}}), "at most 6 digits"),
    (CHAT, as_format("x"), "response_format.schema='x': a mapping"),
    (CHAT, as_format({"properties": ["strict"]}), "schema.properties=a list of 1: a mapping"),
    (CHAT, as_format({"properties": None}), "schema.properties=null: a mapping is required"),
    (CHAT, as_format({"properties": {"strict": True}}), "properties.strict=true: a mapping"),
    (CHAT, with_tool({"type": [{"a": i} for i in range(300)]}), "strings or numbers alone"),
    (CHAT, with_tool({"required": [i if i % 2 else str(i) for i in range(300)]}), "strings or"),
    (CHAT, with_tool({"enum": [0] * MOST_TOOL_VALUES}), "at most 8192 are allowed"),
    (CHAT, with_tool(True), "tools[0].function.parameters=true: a mapping is required"),
    (CHAT, with_tool(False), "tools[0].function.parameters=false: a mapping is required"),
]


@pytest.mark.parametrize(("path", "body", "text"), REFUSED)
def test_refuses(path: str, body: dict[str, Any], text: str) -> None:
    reply = make_world(max_prompt_bytes=1 << 20).post(path, body)
    assert reply.status_code == 400, reply.text
    assert text in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        with_format(
            {"pattern": "(a)" * MOST_GROUPS, "properties": {"pattern": {"type": "string"}}}
        ),
        as_format({"properties": {"strict": {"default": True}}}),
        as_format({"title": "x"}),
        as_format({"properties": {"strict": None}}),
        as_format(None),
        with_tool({"enum": [f"v{i}" for i in range(2000)], "maximum": 3}),
        with_tool({"pattern": "(a{0,999999})" * 128, "description": "{10000000"}),
        with_tool({"enum": [*range(1000)], "description": "(" * 1000}),
        with_tool({"anyOf": [{"type": "null"}] * 256}),
        with_tool(None),
    ],
)
def test_allows(body: dict[str, Any]) -> None:
    reply = make_world(max_prompt_bytes=1 << 20).post(CHAT, body)
    assert reply.status_code == 200, reply.text


def test_a_body_of_very_many_parts_is_refused() -> None:
    """SGLang and the edge look at each, on the event loop."""
    world = make_world(max_prompt_bytes=1 << 20)
    messages = [{"role": "user", "content": [{}] * 4000}] * 20
    reply = world.post(CHAT, {"messages": messages})
    assert reply.status_code == 400
    assert "more than 65536 lists and mappings" in reply.json()["error"]["message"]


def test_arguments_of_very_many_parts_are_refused() -> None:
    """SGLang opens them where they are text."""
    function = {"name": "f", "arguments": json.dumps({"a": [[]] * 70000})}
    call = {"id": "1", "type": "function", "function": function}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    reply = make_world(max_prompt_bytes=1 << 20).post(CHAT, {"messages": messages})
    assert reply.status_code == 400
    assert "more than 65536 lists and mappings" in reply.json()["error"]["message"]
