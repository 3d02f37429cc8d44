# SPDX-License-Identifier: Apache-2.0
"""What a request may hold. What is refused here ended SGLang's scheduler, or kept it busy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from edge_world import CHAT, COMPLETIONS, NATIVE, World, make_world

MESSAGES = [{"role": "user", "content": "hi"}]


def _called(arguments: object) -> dict[str, Any]:
    """An assistant's message that calls a function."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 100000}, "top_logprobs=100000"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "logprobs=true"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": -1}, "top_logprobs=-1"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs=21"),
    (COMPLETIONS, {"prompt": [-1, 5]}, r"prompt[0]=-1"),
    (COMPLETIONS, {"prompt": [1000]}, r"prompt[0]=1000"),
    (COMPLETIONS, {"prompt": [5, 10**9]}, r"prompt[1]=1000000000"),
    (COMPLETIONS, {"prompt": [10**40]}, "an integer of 133 bits"),
    (COMPLETIONS, {"prompt": [1, True]}, r"prompt[1]=true"),
    (COMPLETIONS, {"prompt": [1.0]}, r"prompt[0]=1.0"),
    (COMPLETIONS, {"prompt": [[1], [1000]]}, r"prompt[1][0]=1000"),
    (COMPLETIONS, {"prompt": [[1], "x"]}, r"prompt[1]='x'"),
    (COMPLETIONS, {"prompt": []}, "at least one token id"),
    (COMPLETIONS, {"prompt": [[]]}, "at least one token id"),
    (COMPLETIONS, {"prompt": ""}, "prompt has 0 bytes"),
    (COMPLETIONS, {"prompt": [1] * 257}, "257 tokens"),
    (COMPLETIONS, {"prompt": "é" * 2049}, "prompt has 4098 bytes; 1 to 4096"),
    (COMPLETIONS, {"prompt": "x", "n": 20000}, "n=20000"),
    (COMPLETIONS, {"prompt": "x", "n": "20000"}, "n='20000'"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "n=0"),
    (COMPLETIONS, {"prompt": ["x"] * 17}, "a list of 1 to 16"),
    (COMPLETIONS, {"prompt": ["x"] * 9, "n": 2}, "18 completions; at most 16"),
    (COMPLETIONS, {"prompt": "x", "best_of": 17}, "best_of=17"),
    (COMPLETIONS, {"prompt": "x", "best_of": 1, "n": 2}, "best_of: SGLang returns each"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of: SGLang returns each"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens=0"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 257}, "max_tokens=257"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2**70}, "max_tokens="),
    (COMPLETIONS, {"prompt": "x", "stop": ["x"] * 17}, "a list of 0 to 16"),
    (COMPLETIONS, {"prompt": "x", "stop": "x" * 257}, "stop has 257 bytes"),
    (COMPLETIONS, {"prompt": "x", "stop": ["a", ""]}, r"stop[1] has 0 bytes"),
    (COMPLETIONS, {"prompt": "x", "stop": 3}, "stop=3"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [1000]}, r"stop_token_ids[0]=1000"),
    (COMPLETIONS, {"prompt": "x", "stop_regex": "(a+)+$"}, "stop_regex: this server has no such"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"1000": 1}}, "logit_bias key='1000'"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias key='-1'"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"٣": 1}}, "logit_bias key="),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": 101}}, r"logit_bias[1]=101"),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature=-1"),
    (COMPLETIONS, {"prompt": "x", "temperature": 1e300}, "temperature="),
    (COMPLETIONS, {"prompt": "x", "temperature": True}, "temperature=true"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p=0"),
    (COMPLETIONS, {"prompt": "x", "top_p": 1.5}, "top_p=1.5"),
    (COMPLETIONS, {"prompt": "x", "top_k": 0}, "top_k=0"),
    (COMPLETIONS, {"prompt": "x", "min_p": -0.1}, "min_p=-0.1"),
    (COMPLETIONS, {"prompt": "x", "repetition_penalty": 1e-300}, "repetition_penalty="),
    (COMPLETIONS, {"prompt": "x", "frequency_penalty": 3}, "frequency_penalty=3"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**64}, "seed="),
    (COMPLETIONS, {"prompt": "x", "json_schema": "x" * 70000}, "json_schema has 70000 bytes"),
    (COMPLETIONS, {"prompt": "x", "custom_logit_processor": "x"}, "custom_logit_processor"),
    (COMPLETIONS, {"prompt": "x", "lora_path": "/etc"}, "lora_path"),
    (COMPLETIONS, {"prompt": "x", "bootstrap_host": "h"}, "bootstrap_host"),
    (COMPLETIONS, {"prompt": "x", "return_hidden_states": True}, "return_hidden_states=true"),
    (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 0}, "logprobs=0: at least 1 with echo"),
    (COMPLETIONS, {}, "prompt is missing"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 3.0}, "max_tokens=3.0"),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "maximal"}, "reasoning_effort='maximal'"),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": 1.5}, "a number from 0 to 0.99"),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": True}, "reasoning_effort=true"),
    (CHAT, {"messages": [*MESSAGES, _called(5)]}, "arguments=5: a string is required"),
    (CHAT, {"messages": [_called({"a": "x" * 4097})]}, "messages[0] has"),
    (CHAT, {"messages": [_called('{"a":' * 400 + "1" + "}" * 400)]}, "more than 32 deep"),
    (CHAT, {"messages": [_called('{"a":' * 33 + "1" + "}" * 33)]}, "arguments: the JSON is nested"),
    ("/detokenize", {"tokens": "abc"}, "a list of token ids is required"),
    ("/detokenize", {"tokens": [[], "a"]}, "tokens[1]='a'"),
    ("/detokenize", {"tokens": [[], [1000]]}, "tokens[1][0]=1000"),
    (CHAT, {"messages": []}, "a list of 1 to"),
    (CHAT, {"messages": [{"content": "x"}]}, r"messages[0].role is missing"),
    (CHAT, {"messages": [{"role": "root", "content": "x"}]}, r"messages[0].role='root'"),
    (CHAT, {"messages": [*MESSAGES, {"role": "user"}]}, r"messages[1].content is missing"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, r"messages[0].content is missing"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        r"messages[0].content[0].text is missing",
    ),
    (
        "/tokenize",
        {"messages": [{"role": "tool", "content": [{"text": "x"}]}]},
        r"messages[0].content[0].type is missing",
    ),
    (NATIVE, {"input_ids": "x"}, "input_ids='x': a list of token ids is required"),
    (NATIVE, {"input_ids": ["x"]}, r"input_ids[0]='x': an integer from 0 to 999"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 4097}]}, "messages[0] has"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 2100}] * 2}, "messages and tools have"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type='image_url': this server serves its model for text; images, "
        "video and audio are not accepted",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"video_url": {}, "type": "video_url"}]}]},
        "type='video_url': this server serves its model for text",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "type='input_audio': this server serves its model for text",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "image_url": {}}]}]},
        "messages[0].content[0].image_url: this server has no such field",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}},
        "chat_template_kwargs.messages=1",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "chat_template_kwargs": {"spaces_between_special_tokens": 1}},
        "chat_template_kwargs.spaces_between_special_tokens=1: true or false is required",
    ),
    (CHAT, {"messages": MESSAGES, "input_ids": [1]}, "input_ids: this server has no such"),
    (NATIVE, {"input_ids": [-1, 5]}, r"input_ids[0]=-1"),
    (NATIVE, {"text": "x", "input_ids": [1]}, "exactly one of text and input_ids"),
    (NATIVE, {"text": "x", "top_logprobs_num": 100000}, "top_logprobs_num=100000"),
    (NATIVE, {"text": "x", "sampling_params": {"n": 20000}}, "sampling_params.n=20000"),
    (NATIVE, {"text": "x", "sampling_params": [{}]}, "one mapping"),
    (NATIVE, {"text": "x", "sampling_params": {"custom_params": {}}}, "custom_params: this server"),
    (NATIVE, {"text": "x", "token_ids_logprob": [1000]}, r"token_ids_logprob[0]=1000"),
    (
        NATIVE,
        {"text": "x" * 150, "token_ids_logprob": [1] * 1000, "logprob_start_len": 0},
        "token_ids_logprob=a list of 1000: at most 469 for the 279 tokens",
    ),
    (
        NATIVE,
        {
            "input_ids": [1],
            "token_ids_logprob": [1] * 600,
            "sampling_params": {"max_new_tokens": 256},
        },
        "at most 512 for the 256 tokens",
    ),
    (NATIVE, {"text": "x", "rid": "HEALTH_CHECK_1"}, "rid="),
    (
        NATIVE,
        {"text": "x", "rid": "a", "sampling_params": {"n": 2}},
        "one prompt beside it, and n=1",
    ),
    (NATIVE, {"text": "x", "image_data": "/etc/passwd"}, "image_data='/etc/passwd': this server"),
    (NATIVE, {"text": "x", "video_data": ["v"]}, "images, video and audio are not accepted"),
    (NATIVE, {"text": "x", "audio_data": ["a"]}, "images, video and audio are not accepted"),
    (NATIVE, {"text": "x", "input_embeds": [[1.0]]}, "input_embeds"),
    ("/tokenize", {"prompt": "x" * 5000}, "prompt has 5000 bytes"),
    ("/detokenize", {"tokens": [1000]}, r"tokens[0]=1000"),
]

ALLOWED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"model": "m", "prompt": "x", "max_tokens": 256, "n": 2, "stop": ["a", "b"]}),
    (COMPLETIONS, {"prompt": [0, 999], "logprobs": 20, "temperature": 0, "top_k": -1}),
    (COMPLETIONS, {"prompt": [[1]], "stream": True, "stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"prompt": ["a", "b"], "logit_bias": {"999": -100}, "seed": -1, "echo": True}),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "user": "u"}),
    (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "r"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "tool_choice": "auto",
            "response_format": {"type": "json_object"},
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    (NATIVE, {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 0}, "rid": "to-abort"}),
    (NATIVE, {"text": "x", "return_logprob": True, "logprob_start_len": -1, "lora_path": None}),
    (NATIVE, {"text": "x" * 900, "token_ids_logprob": [1] * 1024}),
    (NATIVE, {"text": "x" * 900, "token_ids_logprob": [1] * 20, "logprob_start_len": 0}),
    (COMPLETIONS, {"prompt": "x", "json_schema": '{"pattern": "(a)", "maxLength": 9}'}),
    (COMPLETIONS, {"prompt": "x", "json_schema": "$$ANY$$"}),
    ("/v1/tokenize", {"model": "default", "prompt": "x"}),
    ("/v1/detokenize", {"tokens": []}),
    ("/v1/detokenize", {"tokens": [[]]}),
    ("/v1/detokenize", {"tokens": [[], [1, 2]]}),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "xhigh"}),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "max"}),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": 0.5}),
    (CHAT, {"messages": [*MESSAGES, _called({"a": {"b": [1]}})]}),
    (CHAT, {"messages": [*MESSAGES, _called("{}")]}),
    (CHAT, {"messages": [*MESSAGES, _called('{"a":' * 32 + "1" + "}" * 32)]}),
    (CHAT, {"messages": [*MESSAGES, _called("in words")]}),
    (CHAT, {"messages": [*MESSAGES, _called("[" * 33 + "]" * 33)]}),
    *(
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"spaces_between_special_tokens": x}})
        for x in (True, False, None)
    ),
    (CHAT, {"messages": MESSAGES, "stop": []}),
    (COMPLETIONS, {"prompt": "x", "stop": []}),
    (NATIVE, {"text": "x", "sampling_params": {"stop": []}}),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 0}),
    (CHAT, {"messages": MESSAGES, "logprobs": False, "top_logprobs": 0}),
]  # fmt: skip


@pytest.fixture
def world() -> World:
    return make_world()


@pytest.mark.parametrize(("path", "body", "text"), REFUSED)
def test_refuses(world: World, path: str, body: dict[str, Any], text: str) -> None:
    reply = world.post(path, body)
    assert reply.status_code == 400, reply.text
    assert text in reply.json()["error"]["message"]
    assert len(reply.text) < 600
    assert not world.behind.seen
    assert world.refused == [400]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("content", ["x", None, [{"type": "text", "text": "x"}]])
def test_a_message_that_is_continued_has_one_before_it(
    world: World, path: str, content: object
) -> None:
    """SGLang takes it away, and fails at a template without messages."""
    said = {"role": "assistant", "content": content}
    reply = world.post(path, {"messages": [said], "continue_final_message": True})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages"
    assert not world.behind.seen
    for body in (
        {"messages": [*MESSAGES, said], "continue_final_message": True},
        {"messages": [said], "continue_final_message": False},
        {"messages": MESSAGES, "continue_final_message": True},
    ):
        assert world.post(path, body).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, NATIVE])
@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"temperature": 10**400}, "temperature"),
        ({"logit_bias": {"1": -(10**400)}}, "logit_bias[1]"),
    ],
)
def test_an_integer_that_no_float_holds_is_refused_by_name(
    world: World, path: str, field: dict[str, Any], param: str
) -> None:
    """It is JSON, and too long to be made a float of."""
    body = {
        COMPLETIONS: {"prompt": "x", **field},
        CHAT: {"messages": MESSAGES, **field},
        NATIVE: {"text": "x", "sampling_params": field},
    }[path]
    reply = world.post(path, body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == f"{'sampling_params.' * (path == NATIVE)}{param}"
    assert "integer of 1329 bits" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), ALLOWED)
def test_hands_on(world: World, path: str, body: dict[str, Any]) -> None:
    reply = world.post(path, body)
    assert reply.status_code == 200, reply.text
    (seen,) = world.behind.seen
    given = {name: value for name, value in body.items() if value is not None and name != "user"}
    understood = json.loads(seen["body"])
    assert understood.keys() == given.keys()
    assert world.edge.admission.taken == 0


@pytest.mark.parametrize("model", ["gpt-4", "m:adapter", ""])
def test_unknown_models(world: World, model: str) -> None:
    reply = world.post(COMPLETIONS, {"model": model, "prompt": "x"})
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"
    assert world.get("/v1/models/m").status_code == 200
    assert world.get("/v1/models/other").status_code == 404


def test_sglang_gets_what_was_checked(world: World) -> None:
    """Of two keys of one name the checks see one, and so must SGLang."""
    reply = world.post(COMPLETIONS, b'{"prompt":"x","n":20000,"n":1,"max_tokens":null}')
    assert reply.status_code == 200
    (seen,) = world.behind.seen
    assert seen["body"] == b'{"prompt":"x","n":1}'
    assert (b"content-length", b"20") in seen["headers"]


def test_forced_tokens_need_evaluation() -> None:
    body = {"text": "x", "sampling_params": {"custom_params": {"forced_token_ids": [1]}}}
    assert make_world(is_evaluation=True).post(NATIVE, body).status_code == 200


@pytest.mark.parametrize("forced", [["x"], [[1]], [-1], [1000], [10**30], [1.5], [True], "ab"])
def test_forced_tokens_are_tokens_of_the_model(forced: Any) -> None:
    body = {"text": "x", "sampling_params": {"custom_params": {"forced_token_ids": forced}}}
    world = make_world(is_evaluation=True)
    reply = world.post(NATIVE, body)
    assert reply.status_code == 400
    assert "sampling_params.custom_params.forced_token_ids" in reply.json()["error"]["message"]
    assert not world.behind.seen


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"prompt":"x","temperature":NaN}', "not valid JSON"),
        (b'{"prompt":"x","temperature":1e999}', "not valid JSON"),
        (b'{"prompt":"\\ud800"}', "not valid JSON"),
        (b'{"prompt":"\xff"}', "not valid JSON"),
        (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "more than 32 deep"),
        (b'{"prompt":' + b"[" * 40 + b"]" * 40 + b"}", "more than 32 deep"),
        (b'{"prompt":' + b'{"a":' * 40 + b"1" + b"}" * 40 + b"}", "more than 32 deep"),
    ],
)
def test_bad_json(world: World, body: bytes, text: str) -> None:
    reply = world.post(COMPLETIONS, body)
    assert reply.status_code == 400
    assert text in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x", "regex": "a+"}),
        (COMPLETIONS, {"prompt": "x", "response_format": {"type": "json_object"}}),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}),
        (CHAT, {"messages": MESSAGES, "tool_choice": {"type": "function"}}),
        (NATIVE, {"text": "x", "sampling_params": {"json_schema": "{}"}}),
    ],
)
def test_grammars_need_a_backend(path: str, body: dict[str, Any]) -> None:
    """SGLang without one ends the request late, and a stream with logprobs with 500."""
    assert make_world().post(path, body).status_code == 200
    reply = make_world(has_grammars=False).post(path, body)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert "--grammar-backend none" in message
    assert message.endswith(("; leave it out", "; use text", "; use auto or none"))


def test_a_suffix_needs_a_template() -> None:
    """SGLang without one passes over it; with one it takes a list of prompts for text."""
    one, several = {"prompt": "x", "suffix": "y"}, {"prompt": ["x"], "suffix": "y"}
    for world, body in ((make_world(), one), (make_world(has_suffixes=True), several)):
        reply = world.post(COMPLETIONS, body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "suffix"
    assert make_world(has_suffixes=True).post(COMPLETIONS, one).status_code == 200
