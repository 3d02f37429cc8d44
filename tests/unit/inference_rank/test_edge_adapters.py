# SPDX-License-Identifier: Apache-2.0
"""Requests that name a LoRA adapter: served, or refused by name, by what the policy reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from edge_world import CHAT, COMPLETIONS, NATIVE, World, make_limits, make_world

from tandemkv.cache_rank.policies.registry import POLICIES, find_policy, selection_values
from tandemkv.cache_rank.protocol.messages import Timing
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings, SelectionSettings
from tandemkv.inference_rank.edge import install as install_module
from tandemkv.inference_rank.edge.adapters import adapters_of
from tandemkv.inference_rank.edge.limits import Adapters
from tandemkv.inference_rank.edge.settings import EdgeSettings

MESSAGES = [{"role": "user", "content": "hi"}]
NAMED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "x", "lora_path": "polite"}),
    (COMPLETIONS, {"prompt": "x", "model": "m:polite"}),
    (COMPLETIONS, {"prompt": "x", "model": " m : polite "}),
    (CHAT, {"messages": MESSAGES, "lora_path": "polite"}),
    (CHAT, {"messages": MESSAGES, "model": "default:polite"}),
    (NATIVE, {"text": "x", "lora_path": "polite"}),
]
OF_THE_MODEL: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "x", "model": "m"}),
    (COMPLETIONS, {"prompt": "x", "model": "m:"}),
    (CHAT, {"messages": MESSAGES, "lora_path": None}),
    (NATIVE, {"text": "x"}),
]


def server(policy: str, *, enable_lora: bool = True) -> Adapters | None:
    """Return what a server with one adapter and a policy has."""
    selection = SelectionSettings.model_validate(selection_values({"policy": policy}))
    paths = [SimpleNamespace(lora_name="polite", lora_path="/adapters/polite")]
    arguments = SimpleNamespace(enable_lora=enable_lora, lora_paths=paths)
    return adapters_of(arguments, selection)


def world_of(adapters: Adapters | None) -> World:
    world = make_world()
    world.edge._limits = replace(make_limits(), adapters=adapters)
    return world


@pytest.mark.parametrize("policy", list(POLICIES))
def test_policies_that_predict_from_the_stream_serve_none(policy: str) -> None:
    adapters = server(policy)
    assert adapters is not None
    timing = find_policy(policy).capabilities.timing
    assert bool(adapters.unserved) == (timing is Timing.SAME_STEP_HIDDEN)
    assert server(policy, enable_lora=False) is None


@pytest.mark.parametrize(("path", "body"), NAMED)
def test_an_adapter_is_refused_by_name_where_queries_are_predicted(
    path: str, body: dict[str, Any]
) -> None:
    world = world_of(server("look_ahead"))
    reply = world.post(path, body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "adapter_not_served")
    for words in ("'polite'", "policy=look_ahead predicts queries from W_q", "--policy exact"):
        assert words in error["message"]
    assert not world.behind.seen


@pytest.mark.parametrize(("path", "body"), NAMED)
@pytest.mark.parametrize("policy", ["exact", "streaming", "quest"])
def test_it_is_handed_on_where_they_are_not(path: str, body: dict[str, Any], policy: str) -> None:
    world = world_of(server(policy))
    reply = world.post(path, body)
    assert reply.status_code == 200, reply.text
    (seen,) = world.behind.seen
    assert json.loads(seen["body"]) == body


@pytest.mark.parametrize(("path", "body"), OF_THE_MODEL)
@pytest.mark.parametrize("policy", ["look_ahead", "exact"])
def test_requests_of_the_model_itself_are_served(
    path: str, body: dict[str, Any], policy: str
) -> None:
    assert world_of(server(policy)).post(path, body).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"lora_path": "rude"}, 400, "no adapter 'rude'; it has 'polite'"),
        ({"model": "m:rude"}, 400, "no adapter 'rude'"),
        ({"model": "m:a:b"}, 400, "no adapter 'a:b'"),
        ({"lora_path": ["polite"]}, 400, "the name of one adapter is required"),
        ({"lora_path": ""}, 400, "the name of one adapter is required"),
        ({"lora_path": 3}, 400, "the name of one adapter is required"),
        ({"model": "gpt-4:polite"}, 404, "this server serves m"),
    ],
)
def test_other_names_are_refused(body: dict[str, Any], status: int, words: str) -> None:
    world = world_of(server("exact"))
    reply = world.post(COMPLETIONS, {"prompt": "x", **body})
    assert reply.status_code == status
    assert words in reply.json()["error"]["message"]
    assert not world.behind.seen


def test_without_lora_the_field_is_refused() -> None:
    reply = world_of(None).post(COMPLETIONS, {"prompt": "x", "lora_path": "polite"})
    assert reply.status_code == 400
    assert "has no adapters (it was started without" in reply.json()["error"]["message"]
    assert world_of(None).post(COMPLETIONS, {"prompt": "x", "model": "m:polite"}).status_code == 404


@pytest.mark.parametrize("enable_lora", [None, True])
def test_adapters_are_those_that_sglang_has_loaded(
    enable_lora: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SGLang may leave its arguments as they were passed: `--lora-paths` alone serves them."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path="dummy", device="cpu", max_running_requests=2, served_model_name="m",
        enable_lora=enable_lora, lora_paths=[f"polite={tmp_path}"], max_lora_rank=8,
        lora_target_modules=["q_proj"], chunked_prefill_size=64, page_size=1,
    )  # fmt: skip
    getattr(args, "resolve_once", lambda: None)()
    args.check_server_args()
    selection = SelectionSettings.model_validate(selection_values({"policy": "exact"}))
    monkeypatch.setattr(install_module, "edge_settings", EdgeSettings)
    monkeypatch.setattr(
        install_module.runtime_module,
        "settings_from_environment",
        lambda: RankSettings(selection=selection),
    )
    monkeypatch.setattr(install_module, "_refusal_counter", lambda: None)
    monkeypatch.setattr(install_module, "_is_installed", False)
    app: Any = SimpleNamespace(build_middleware_stack=lambda: None)
    model = SimpleNamespace(vocab_size=1000)
    manager = SimpleNamespace(
        model_config=model, context_len=256, tokenizer=None, preferred_sampling_params=None
    )
    install_module.install(app, args, manager, execute_warmup_func=lambda given: given)
    assert app.build_middleware_stack()._limits.adapters == Adapters(names=frozenset({"polite"}))
