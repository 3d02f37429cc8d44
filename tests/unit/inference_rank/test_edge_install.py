# SPDX-License-Identifier: Apache-2.0
"""What is checked of SGLang's own settings when the edge is put around its application."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.inference_rank.edge import install as install_module
from tandemkv.inference_rank.edge.limits import Limits
from tandemkv.inference_rank.edge.refusal import RequestRefusedError
from tandemkv.inference_rank.edge.requests import check_chat
from tandemkv.inference_rank.edge.settings import EdgeSettings
from tandemkv.inference_rank.sglang import versions as sglang_versions


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put an edge around an application whose requests have these defaults; without grammars."""
    monkeypatch.setattr(install_module, "edge_settings", EdgeSettings)
    runtime = install_module.runtime_module
    monkeypatch.setattr(runtime, "settings_from_environment", RankSettings)
    monkeypatch.setattr(install_module, "resolved", lambda args: args)
    monkeypatch.setattr(install_module, "_refusal_counter", lambda: None)
    monkeypatch.setattr(install_module, "_is_installed", False)
    args = SimpleNamespace(
        max_running_requests=2, served_model_name="m", grammar_backend="none", enable_lora=False,
        completion_template=None, device="cpu",
    )  # fmt: skip

    def install(preferred: dict[str, Any] | None) -> Limits:
        app: Any = SimpleNamespace(build_middleware_stack=lambda: None)
        manager = SimpleNamespace(
            model_config=SimpleNamespace(vocab_size=1000), context_len=256, tokenizer=None,
            preferred_sampling_params=preferred,
        )  # fmt: skip
        install_module.install(app, args, manager, execute_warmup_func=lambda given: given)
        limits: Limits = app.build_middleware_stack()._limits
        return limits

    return install


def test_levels_of_reasoning_are_those_of_the_installed_sglang(installed: Any) -> None:
    """SGLang 0.5.23 takes one more: it is refused where stock SGLang refuses it, and only there."""
    limits = installed(None)
    version = sglang_versions.installed()
    assert version is not None
    has_ultra = sglang_versions.check_version(version) >= 23
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra", "maximal"):
        body = {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": effort}
        taken_by_stock = True
        try:
            ChatCompletionRequest.model_validate({"model": "m", **body})
        except ValueError:
            taken_by_stock = False
        assert taken_by_stock == (effort != "maximal" and (effort != "ultra" or has_ultra))
        if taken_by_stock:
            assert check_chat(body, limits) == 1
        else:
            with pytest.raises(RequestRefusedError, match=f"reasoning_effort='{effort}'"):
                check_chat(body, limits)


@pytest.mark.parametrize(
    ("preferred", "words"),
    [
        # SGLang 0.5.19 and later would decode rows beside the request's own, which have no sets.
        ({"beam_width": 2}, "sampling_params.beam_width: this server has no such field"),
        ({"stop_regex": "(a+)+b"}, "sampling_params.stop_regex: this server has no such field"),
        ({"repetition_penalty": 1e-9}, "sampling_params.repetition_penalty=1e-09: a number from"),
        ({"regex": "a"}, "this server constrains no answers: it runs with --grammar-backend none"),
        ({"max_new_tokens": 257}, "an integer from 0 to 256"),
    ],
)
def test_a_default_of_all_requests_is_one_that_a_request_may_give(
    installed: Any, preferred: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        installed(preferred)
    assert str(caught.value).startswith("SGLang argument --preferred-sampling-params: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "preferred", [None, {}, {"temperature": 0.3, "top_p": 0.9, "max_new_tokens": 256, "top_k": -1}]
)
def test_others_are_left_as_they_are(installed: Any, preferred: dict[str, Any] | None) -> None:
    given = None if preferred is None else dict(preferred)
    installed(preferred)
    assert preferred == given
