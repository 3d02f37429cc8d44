# SPDX-License-Identifier: Apache-2.0
"""OpenAPI schema of the routes that are served, within the bounds of the edge.

Written by hand: SGLang's ``/openapi.json`` answers 500 in 0.5.17 (FastAPI cannot describe
``GenerateReqInput``), and with the models of its other routes Schemathesis generates no first
request within minutes. Schemathesis also sends what this schema does not allow.
"""

from __future__ import annotations

from typing import Any

VOCABULARY = 49152  # SmolLM2
_FLAG = {"type": "boolean"}
_TEXT = {"type": "string", "minLength": 1, "maxLength": 400}


def _whole(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _number(least: float, most: float) -> dict[str, Any]:
    return {"type": "number", "minimum": least, "maximum": most}


def _list(items: dict[str, Any], most: int, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_IDS = _list(_whole(0, VOCABULARY - 1), 50, 1)
_PROMPT = {"anyOf": [_TEXT, _list(_TEXT, 3, 1), _IDS, _list(_IDS, 3, 1)]}
_STOP = {"type": "string", "minLength": 1, "maxLength": 20}
_SAMPLING: dict[str, Any] = {
    "temperature": _number(0, 10),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _whole(1, 1 << 30),
    "min_p": _number(0, 1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 2),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[1-9][0-9]{0,3}$"},
        "additionalProperties": _number(-100, 100),
    },
    "n": _whole(1, 3),
    "stop": {"anyOf": [_STOP, _list(_STOP, 3, 1)]},
    "stop_token_ids": _list(_whole(0, VOCABULARY - 1), 3),
    "ignore_eos": _FLAG,
    "no_stop_trim": _FLAG,
    "skip_special_tokens": _FLAG,
}
_OPENAI: dict[str, Any] = {
    **_SAMPLING,
    "model": {"const": "default"},
    "max_tokens": _whole(1, 8),
    "min_tokens": _whole(0, 8),
    "seed": _whole(-(1 << 63), (1 << 63) - 1),
    "stream": _FLAG,
    "stream_options": _object({"include_usage": _FLAG}),
    "response_format": _object({"type": {"enum": ["text", "json_object"]}}, "type"),
    "return_token_ids": _FLAG,
}
_PART = _object({"type": {"const": "text"}, "text": _TEXT}, "type", "text")
_CALL = _object(
    {
        "id": _STOP,
        "type": {"const": "function"},
        "function": _object({"name": _STOP, "arguments": _TEXT}, "name", "arguments"),
    },
    "type",
    "function",
)
_MESSAGE = _object(
    {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [_TEXT, _list(_PART, 3)]},
        "tool_calls": _list(_CALL, 2),
    },
    "role",
    "content",
)
_FUNCTION = _object({"name": _STOP, "description": _TEXT, "parameters": {"type": "object"}}, "name")
_TOOLS = _list(_object({"type": {"const": "function"}, "function": _FUNCTION}, "function"), 2)
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": _object(
        {**_OPENAI, "prompt": _PROMPT, "echo": _FLAG, "logprobs": _whole(0, 20), "suffix": _TEXT},
        "prompt",
        "max_tokens",
    ),
    "/v1/chat/completions": _object(
        {
            **_OPENAI,
            "messages": _list(_MESSAGE, 4, 1),
            "tools": _TOOLS,
            "tool_choice": {"enum": ["none", "auto", "required"]},
            "logprobs": _FLAG,
            "continue_final_message": _FLAG,
            "chat_template_kwargs": {"type": "object", "additionalProperties": _STOP},
        },
        "messages",
        "max_tokens",
    ),
    "/generate": _object(
        {
            "text": _TEXT,
            "sampling_params": _object(
                {**_SAMPLING, "max_new_tokens": _whole(0, 8), "min_new_tokens": _whole(0, 8)},
                "max_new_tokens",
            ),
            "return_logprob": _FLAG,
            "logprob_start_len": _whole(-1, 400),
            "top_logprobs_num": _whole(0, 20),
            "token_ids_logprob": _list(_whole(0, VOCABULARY - 1), 5),
            "stream": _FLAG,
        },
        "text",
        "sampling_params",
    ),
    "/v1/tokenize": _object({"prompt": _TEXT, "add_special_tokens": _FLAG}, "prompt"),
    "/v1/detokenize": _object({"tokens": _IDS, "skip_special_tokens": _FLAG}, "tokens"),
}
_READ = ("/v1/models", "/v1/models/default", "/model_info", "/tandemkv/ready", "/tandemkv/status")


def schema() -> dict[str, Any]:
    """Return the schema."""
    paths: dict[str, Any] = {path: {"post": _operation(body)} for path, body in _BODIES.items()}
    paths |= {path: {"get": _operation(None)} for path in _READ}
    return {"openapi": "3.1.0", "info": {"title": "tandemkv", "version": "0"}, "paths": paths}


def _operation(body: dict[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"responses": {"200": {"description": "answer"}}}
    if body is not None:
        content = {"application/json": {"schema": body}}
        found["requestBody"] = {"required": True, "content": content}
    return found
