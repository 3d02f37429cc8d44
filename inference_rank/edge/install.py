# SPDX-License-Identifier: Apache-2.0
"""Put the edge around SGLang's application. The only module here that knows SGLang's objects."""

from __future__ import annotations

import collections
import secrets
from collections.abc import Callable
from typing import Any, get_args

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.inference_rank import runtime as runtime_module
from tandemkv.inference_rank.sglang.versions import resolved, with_key

from . import logprobs, tokenizing
from .adapters import adapters_of
from .keys import Keys
from .limits import Limits
from .middleware import Edge
from .refusal import RequestRefusedError
from .requests import MODEL_NAME, check_native
from .settings import edge_settings

PAUSED = "generation is paused; POST /continue_generation with the admin key ends that"

_is_installed = False
_refused: collections.Counter[int] = collections.Counter()


def install(
    app: Any, server_args: Any, manager: Any, *, execute_warmup_func: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Wrap `app`, outside of all middleware that SGLang has added or will.

    `app` is not yet started. `execute_warmup_func` takes the server's arguments and sends SGLang's
    first request, over HTTP; it is returned with a key that the edge accepts. Raises
    `SettingsError` if a key file, what the launcher handed over or SGLang's own default of a
    request cannot be used.
    """
    from sglang.srt.entrypoints.openai.protocol import ReasoningEffortTier

    global _is_installed
    settings, rank_settings = edge_settings(), runtime_module.settings_from_environment()
    args = resolved(server_args)
    limits = Limits(
        settings=settings,
        vocab_size=int(manager.model_config.vocab_size),
        context_tokens=int(manager.context_len),
        max_running_requests=int(args.max_running_requests),
        model_names=frozenset({str(args.served_model_name), MODEL_NAME}),
        reasoning_efforts=get_args(ReasoningEffortTier),
        has_grammars=args.grammar_backend != "none",
        has_gpu=args.device != "cpu",
        has_suffixes=args.completion_template is not None,
        is_evaluation=rank_settings.evaluation,
        adapters=adapters_of(args, rank_settings.selection),
    )
    _check_defaults(manager.preferred_sampling_params, limits)
    keys = Keys.read(settings)
    own_key = secrets.token_hex(32)
    keys.allow_internal(own_key)
    build, count = app.build_middleware_stack, _refusal_counter()
    app.build_middleware_stack = lambda: Edge(
        build(), limits, keys, closed=lambda: pause_reason(manager), count_refusal=count
    )
    _tokenize_once(manager)
    _is_installed = True
    return lambda given: with_key(execute_warmup_func, given, own_key)


def refusals() -> dict[str, int]:
    """Return how many requests did not reach SGLang, in all and by the status of the answer."""
    by_status = {f"edge_refused_{status}": _refused[status] for status in sorted(_refused)}
    return {"edge_refused_total": _refused.total(), **by_status}


def pause_reason(manager: Any) -> str | None:
    """Return why SGLang generates nothing now, or None."""
    return PAUSED if manager.is_pause else None


def decide_request_auth(_original: Callable[..., Any], **_: Any) -> Any:
    """Leave keys to the edge, which every request has passed (AROUND hook).

    SGLang would refuse its administrator's routes otherwise: it knows of no key.
    """
    from sglang.srt.utils.auth import AuthDecision

    if _is_installed:
        return AuthDecision(allowed=True)
    return AuthDecision(allowed=False, error_status_code=403)


def _check_defaults(preferred: dict[str, Any] | None, limits: Limits) -> None:
    """Refuse as default of all requests what none may ask for: SGLang adds it behind the edge."""
    try:
        check_native({"text": "any", "sampling_params": dict(preferred or {})}, limits)
    except RequestRefusedError as refusal:
        raise SettingsError(
            f"SGLang argument --preferred-sampling-params: {refusal.message}"
        ) from None


def _tokenize_once(manager: Any) -> None:
    """Let the tokenizer settle its truncation and padding, before threads share it."""
    if manager.tokenizer is not None:
        manager.tokenizer("settled")


def _refusal_counter() -> Callable[[int], None]:
    # Imported late: the multi-process directory must be in the environment by then.
    from prometheus_client import Counter

    counter = Counter(
        "tandemkv_edge_refused_total", "requests that did not reach SGLang", labelnames=["status"]
    )

    def count(status: int) -> None:
        _refused[status] += 1
        counter.labels(status=str(status)).inc()

    return count


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_OPENAI = "sglang.srt.entrypoints.openai"
_TOKENIZE, _ANSWER = f"{_OPENAI}.serving_tokenize", "_handle_non_streaming_request"

AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.utils.auth.decide_request_auth": decide_request_auth,
    f"{_MANAGER}._tokenize_texts": tokenizing.tokenize_texts,
    f"{_MANAGER}.convert_logprob_style": logprobs.convert_logprob_style,
    f"{_MANAGER}.detokenize_logprob_tokens": logprobs.detokenize_logprob_tokens,
    f"{_OPENAI}.serving_base.OpenAIServingBase.handle_request": tokenizing.handle_request,
    f"{_TOKENIZE}.OpenAIServingTokenize.{_ANSWER}": tokenizing.handle_tokenize,
    f"{_TOKENIZE}.OpenAIServingDetokenize.{_ANSWER}": tokenizing.handle_tokenize,
}
"""Hooks in SGLang's HTTP process; `inference_rank.sglang.hooks` registers them."""
