# SPDX-License-Identifier: Apache-2.0
"""Checks of whole requests, a function a route. Fields that are not listed are refused.

Each function checks a parsed body in place and returns how many completions it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .adapters import lora_path, model_and_adapter
from .body import NoJSONObjectError, parse_json_object
from .limits import Limits
from .refusal import RequestRefusedError, shown
from .sampling import EVALUATION_SAMPLING, NATIVE_SAMPLING, SAMPLING, SEED
from .schemas import response_format, tools
from .values import (
    Check,
    boolean,
    check_fields,
    fault,
    integer,
    json_bytes,
    list_of,
    mapping,
    number,
    one_or_list,
    only,
    string,
    text_bytes,
    token_ids,
    wrong,
)

RequestCheck = Callable[[dict[str, Any], Limits], int]

MODEL_NAME = "default"
"""SGLang's name of whichever model it serves."""

_SHORT = string(256)
# Of OpenAI's API, without effect in SGLang: what their clients send anyway.
_WITHOUT_EFFECT = (
    "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user",
    "verbosity",
)  # fmt: skip
# Off is what every server can do.
_OFF: dict[str, Check] = dict.fromkeys(
    ("return_hidden_states", "return_routed_experts"), only(False)
)
_TEXT = string(Limits.prompt_bytes, least=1)
_TEXTS = one_or_list(_TEXT, Limits.most_completions)
_SEVERAL_IDS = list_of(token_ids, Limits.most_completions, least=1)
_MODEL = string(1024)
_STREAM_OPTIONS = mapping(
    1024,
    {"include_usage": boolean, "continuous_usage_stats": boolean, "include_obfuscation": boolean},
)


def _ids(name: str, value: Any, limits: Limits) -> None:
    """Check the token ids of one prompt or of several."""
    is_several = isinstance(value, list) and value and isinstance(value[0], list)
    (_SEVERAL_IDS if is_several else token_ids)(name, value, limits)


def _prompt(name: str, value: Any, limits: Limits) -> None:
    """Check one prompt or several, as text or as token ids."""
    first = value[0] if isinstance(value, list) and value else value
    (_TEXTS if isinstance(first, str) else _ids)(name, value, limits)


_OPENAI: dict[str, Check] = {
    **SAMPLING,
    **_OFF,
    "model": _MODEL,
    "max_tokens": integer(1, Limits.context),
    "min_tokens": integer(0, Limits.context),
    "seed": SEED,
    "stream": boolean,
    "stream_options": _STREAM_OPTIONS,
    "response_format": response_format,
    "cache_salt": _SHORT,
    "lora_path": lora_path,
    "return_token_ids": boolean,
    "return_cached_tokens_details": boolean,
}
_COMPLETION: dict[str, Check] = {
    **_OPENAI,
    "prompt": _prompt,
    "suffix": _TEXT,
    "echo": boolean,
    "best_of": integer(1, Limits.most_completions),
    "logprobs": integer(0, Limits.most_logprobs),
}
_CONTENT_PART: dict[str, Check] = {"type": only("text"), "text": string(Limits.prompt_bytes)}
_FOR_TEXT = "this server serves its model for text; images, video and audio are not accepted"


def _arguments(name: str, value: Any, limits: Limits) -> None:
    """Check what a function was called with: JSON as a string, as OpenAI has it, or a mapping.

    SGLang opens the string, which the bounds on a request's depth and parts have not seen. What is
    no JSON object in it is for SGLang to judge.
    """
    if isinstance(value, dict):
        mapping(Limits.prompt_bytes)(name, value, limits)
        return
    string(Limits.prompt_bytes)(name, value, limits)
    try:
        parse_json_object(value.encode(), max_depth=limits.settings.max_json_depth)
    except NoJSONObjectError:
        return
    except RequestRefusedError as refusal:
        raise fault(name, f"{name}: {refusal.message}") from None


_FUNCTION: dict[str, Check] = {"name": _SHORT, "arguments": _arguments}
_TOOL_CALL: dict[str, Check] = {
    "id": _SHORT,
    "index": integer(0, 1 << 20),
    "type": only("function"),
    "function": mapping(Limits.prompt_bytes, _FUNCTION),
}
_MOST_MESSAGES, _MOST_CALLS = 4096, 256
_DEFAULT_NEW_TOKENS = 128  # SGLang's
_MOST_LISTED = 1 << 17


def _not_text(name: str, value: Any, _limits: Limits) -> None:
    raise fault(name, f"{name}={shown(value)}: {_FOR_TEXT}")


def _content_part(name: str, value: Any, limits: Limits) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "text":  # before its own fields are
        _not_text(f"{name}.type", kind, limits)
    mapping(Limits.prompt_bytes, _CONTENT_PART)(name, value, limits)
    _require(value, "type", "text", prefix=f"{name}.")


def _content(name: str, value: Any, limits: Limits) -> None:
    part = string(Limits.prompt_bytes)
    if isinstance(value, list):
        part = list_of(_content_part, _MOST_MESSAGES)
    part(name, value, limits)


_MESSAGE: dict[str, Check] = {
    "role": only("system", "developer", "user", "assistant", "tool", "function"),
    "content": _content,
    "name": _SHORT,
    "tool_call_id": _SHORT,
    "reasoning_content": string(Limits.prompt_bytes),
    "tool_calls": list_of(mapping(Limits.prompt_bytes, _TOOL_CALL), _MOST_CALLS),
}


def _template_options(name: str, value: Any, limits: Limits) -> None:
    """Check ``chat_template_kwargs``: switches of a template, no arguments of its renderer."""
    mapping(4096)(name, value, limits)
    for key, item in value.items():
        is_renderers = key in (
            "messages", "conversation", "conversations", "chat_template", "tools", "documents",
            "tokenize", "add_generation_prompt", "continue_final_message", "padding", "truncation",
            "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
            "tokenizer_kwargs", "processor_kwargs", "reasoning_effort",
        )  # fmt: skip
        if is_renderers or not key.isidentifier() or isinstance(item, (dict, list)):
            raise wrong(f"{name}.{key[:80]}", item, "a switch of the model's chat template")
        if key == "spaces_between_special_tokens" and item is not None:
            boolean(f"{name}.{key}", item, limits)  # a sampling parameter


def _effort(name: str, value: Any, limits: Limits) -> None:
    """Check ``reasoning_effort``: a level, or a number as SGLang's models with finer steps have."""
    is_level = isinstance(value, str)
    (only(*limits.reasoning_efforts) if is_level else number(0, 0.99))(name, value, limits)


_CHAT_PROMPT: dict[str, Check] = {
    "messages": list_of(mapping(Limits.prompt_bytes, _MESSAGE), _MOST_MESSAGES, least=1),
    "tools": tools,
    "parallel_tool_calls": boolean,
    "tool_choice": lambda name, value, limits: (
        mapping(1024) if isinstance(value, dict) else only("none", "auto", "required")
    )(name, value, limits),
    "reasoning_effort": _effort,
    "chat_template_kwargs": _template_options,
    "continue_final_message": boolean,
}
_CHAT: dict[str, Check] = {
    **{name: check for name, check in _OPENAI.items() if name != "json_schema"},
    **_CHAT_PROMPT,
    "max_completion_tokens": integer(1, Limits.context),
    "logprobs": boolean,
    "top_logprobs": integer(0, Limits.most_logprobs),
    "separate_reasoning": boolean,
    "stream_reasoning": boolean,
    "return_prompt_token_ids": boolean,
    "return_meta_info": boolean,
}
_NATIVE: dict[str, Check] = {
    **_OFF,
    **dict.fromkeys(("image_data", "video_data", "audio_data"), _not_text),
    "text": _TEXTS,
    "input_ids": _ids,
    "sampling_params": lambda *_: None,  # checked with its own table
    "rid": string(128, pattern=r"(?!HEALTH_CHECK)[A-Za-z0-9._:-]{1,128}"),
    "stream": boolean,
    "return_logprob": boolean,
    "return_text_in_logprobs": boolean,
    "return_prompt_token_ids": boolean,
    "logprob_start_len": integer(-1, Limits.context),
    "top_logprobs_num": integer(0, Limits.most_logprobs),
    "token_ids_logprob": list_of(integer(0, Limits.last_token_id), 1024),
    "extra_key": _SHORT,
    "lora_path": lora_path,
}
_TOKENIZE: dict[str, Check] = {
    "model": _MODEL,
    "prompt": one_or_list(string(Limits.prompt_bytes), Limits.most_completions),
    "add_special_tokens": boolean,
    **_CHAT_PROMPT,
}


def _tokens(name: str, value: Any, limits: Limits) -> None:
    """Check one list of token ids or several; there is a text of none."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        list_of(_some_ids, Limits.most_completions)(name, value, limits)
    else:
        _some_ids(name, value, limits)


def _some_ids(name: str, value: Any, limits: Limits) -> None:
    if value != []:
        token_ids(name, value, limits)


_DETOKENIZE: dict[str, Check] = {
    "model": _MODEL, "tokens": _tokens, "skip_special_tokens": boolean
}  # fmt: skip


def check_completion(body: dict[str, Any], limits: Limits) -> int:
    """Check ``/v1/completions``."""
    _check(body, _COMPLETION, limits, required="prompt")
    if body.pop("best_of", body.get("n", 1)) != body.get("n", 1):
        said = "best_of: SGLang returns each completion, and chooses none; leave it out, or give n"
        raise fault("best_of", said)
    if "suffix" in body and not (limits.has_suffixes and isinstance(body["prompt"], str)):
        # SGLang would pass over it, or answer to the text of a list.
        said = "suffix: it needs one prompt as text, and a server with -- --completion-template"
        raise fault("suffix", f"{said}; leave it out")
    if body.get("echo", False) and body.get("logprobs") == 0:
        raise wrong("logprobs", 0, "at least 1 with echo=true")  # SGLang would answer 500
    _check_grammar(body, limits)
    return _completions(len(_prompts(body["prompt"])), body.get("n", 1), limits)


def check_chat(body: dict[str, Any], limits: Limits) -> int:
    """Check ``/v1/chat/completions``."""
    _check(body, _CHAT, limits, required="messages")
    _check_chat_prompt(body, limits)
    if body.get("top_logprobs", 0) and not body.get("logprobs", False):
        raise wrong("top_logprobs", body["top_logprobs"], "logprobs=true beside it")
    choice = body.get("tool_choice", "auto")
    if not limits.has_grammars and choice not in ("auto", "none"):
        raise _unconstrained("tool_choice", choice, "use auto or none")
    _check_grammar(body, limits)
    return _completions(1, body.get("n", 1), limits)


def check_native(body: dict[str, Any], limits: Limits) -> int:
    """Check SGLang's ``/generate``."""
    _check(body, _NATIVE, limits)
    given = [name for name in ("text", "input_ids") if name in body]
    if len(given) != 1:
        raise RequestRefusedError(400, "exactly one of text and input_ids is required")
    sampling = body.get("sampling_params", {})
    if not isinstance(sampling, dict):
        raise wrong("sampling_params", sampling, "one mapping, for all prompts,")
    table = EVALUATION_SAMPLING if limits.is_evaluation else NATIVE_SAMPLING
    check_fields(sampling, table, limits, prefix="sampling_params.")
    _check_grammar(sampling, limits)
    num_prompts = len(_prompts(body[given[0]]))
    if "rid" in body and (num_prompts > 1 or sampling.get("n", 1) > 1):
        # SGLang aborts such ids when a stream has ended, also if it was refused for another's id.
        raise wrong("rid", body["rid"], "one prompt beside it, and n=1,")
    _check_listed(body, sampling, limits)
    return _completions(num_prompts, sampling.get("n", 1), limits)


def _check_listed(body: dict[str, Any], sampling: dict[str, Any], limits: Limits) -> None:
    """Bound the log probabilities of many chosen tokens: the HTTP process writes out each."""
    num_ids = len(body.get("token_ids_logprob", ()))
    if num_ids <= limits.most_logprobs():
        return
    positions = sampling.get("max_new_tokens", _DEFAULT_NEW_TOKENS)
    start = body.get("logprob_start_len", -1)
    if start >= 0:
        positions += max(_most_prompt_tokens(body) - start, 0)
    if num_ids * positions > _MOST_LISTED:
        raise wrong(
            "token_ids_logprob",
            body["token_ids_logprob"],
            f"at most {max(_MOST_LISTED // positions, limits.most_logprobs())} for the "
            f"{positions} tokens that this request may list (--max-logprobs)",
        )


def _most_prompt_tokens(body: dict[str, Any]) -> int:
    """Return what the longest prompt can have at most: a token is a byte or more."""
    parts = _prompts(body["text"] if "text" in body else body["input_ids"])
    return max(text_bytes(part) if isinstance(part, str) else len(part) for part in parts) + 1


def check_tokenize(body: dict[str, Any], limits: Limits) -> int:
    """Check ``/tokenize``."""
    _check(body, _TOKENIZE, limits)
    if ("prompt" in body) == ("messages" in body):
        raise RequestRefusedError(400, "exactly one of prompt and messages is required")
    if "messages" in body:
        _check_chat_prompt(body, limits)
    return 1


def check_detokenize(body: dict[str, Any], limits: Limits) -> int:
    """Check ``/detokenize``."""
    _check(body, _DETOKENIZE, limits, required="tokens")
    return 1


def _check(
    body: dict[str, Any],
    fields: Mapping[str, Check],
    limits: Limits,
    *,
    required: str | None = None,
) -> None:
    for name in _WITHOUT_EFFECT:
        body.pop(name, None)
    check_fields(body, fields, limits)
    if required is not None:
        _require(body, required)
    model = model_and_adapter(body.get("model", MODEL_NAME), limits)
    if model not in limits.model_names:
        names = ", ".join(sorted(limits.model_names - {MODEL_NAME}))
        raise RequestRefusedError(
            404,
            f"model={shown(model)}: this server serves {names}",
            param="model",
            code="model_not_found",
        )


def _require(found: dict[str, Any], *names: str, prefix: str = "") -> None:
    for name in names:
        if name not in found:
            full = f"{prefix}{name}"
            raise fault(full, f"{full} is missing", "missing_required_parameter")


def _check_chat_prompt(body: dict[str, Any], limits: Limits) -> None:
    """Bound messages and tools together, for all of them are in the prompt."""
    messages = body["messages"]
    for position, message in enumerate(messages):
        prefix = f"messages[{position}]."
        _require(message, "role", prefix=prefix)
        if message["role"] == "user":  # others may have none
            _require(message, "content", prefix=prefix)
    is_alone = len(messages) == 1 and messages[0]["role"] == "assistant"
    if is_alone and body.get("continue_final_message", False):
        # SGLang takes it away before it applies the template, which then has none: 500.
        raise wrong("messages", messages, "one before the assistant's, which is to be continued,")
    length = json_bytes(messages) + json_bytes(body.get("tools", []))
    if length > limits.prompt_bytes():
        raise fault(
            "messages",
            f"messages and tools have {length} bytes; at most {limits.prompt_bytes()} are allowed "
            "(--max-prompt-bytes)",
            "context_length_exceeded",
        )


def _check_grammar(body: dict[str, Any], limits: Limits) -> None:
    """Refuse what constrains an answer where SGLang cannot."""
    if limits.has_grammars:
        return
    for name in ("json_schema", "regex", "ebnf"):
        if name in body:
            raise _unconstrained(name, body[name], "leave it out")
    kind = body.get("response_format", {}).get("type", "text")
    if kind != "text":
        raise _unconstrained("response_format.type", kind, "use text")


def _unconstrained(name: str, value: object, remedy: str) -> RequestRefusedError:
    said = "this server constrains no answers: it runs with --grammar-backend none, as on every CPU"
    return fault(name, f"{name}={shown(value)}: {said}; {remedy}")


def _prompts(prompt: Any) -> list[Any]:
    """Return each prompt of a request, as text or as token ids."""
    is_several = isinstance(prompt, list) and isinstance(prompt[0], (str, list))
    return prompt if is_several else [prompt]


def _completions(num_prompts: int, n: int, limits: Limits) -> int:
    total, most = num_prompts * n, limits.most_completions()
    if total > most:
        raise fault(
            "n",
            f"{num_prompts} prompts times n={n} are {total} completions; at most {most} are "
            "allowed in one request (--max-n)",
            code=None,
        )
    return total
