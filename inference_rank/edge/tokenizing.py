# SPDX-License-Identifier: Apache-2.0
"""Tokenise beside the event loop of the HTTP process.

SGLang tokenises on it: while one caller's long prompt is read, no stream moves and no probe is
answered. Here one thread does it for all, so that prompts are tokenised one after the other; Rust
releases the interpreter lock meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tandemkv.inference_rank.sglang.versions import With

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="tandemkv-tokenizer")
_LEAST_UNWRITABLE = 1 << 64  # of orjson, which writes SGLang's answers


async def tokenize_texts(
    original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run ``TokenizerManager._tokenize_texts`` in the thread (AROUND hook)."""
    if manager.async_dynamic_batch_tokenizer is not None:  # has a thread of its own, and awaits it
        return await original(manager, *args, **kwargs)
    return await _run(lambda: _without_waiting(original(manager, *args, **kwargs)))


async def handle_tokenize(
    original: Callable[..., Any], serving: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run what answers ``/tokenize`` and ``/detokenize`` in the thread (AROUND hook).

    A tokenizer that states no length has 10**30, which SGLang 0.5.17 cannot write: 500. As in
    0.5.23, the model's context takes its place.
    """
    answer = await _run(lambda: _without_waiting(original(serving, *args, **kwargs)))
    if getattr(answer, "max_model_len", 0) >= _LEAST_UNWRITABLE:
        answer.max_model_len = serving.tokenizer_manager.model_config.context_len
    return answer


async def handle_request(
    original: Callable[..., Any], serving: Any, request: Any, raw_request: Any
) -> Any:
    """Check tools, and apply chat templates, which tokenise, in the thread (AROUND hook)."""

    def prepare() -> tuple[Future[Any], Future[Any]]:
        fault = _outcome(lambda: serving._validate_request(request))
        if fault.exception() is not None or fault.result():
            return fault, fault
        return fault, _outcome(lambda: serving._convert_to_internal_request(request, raw_request))

    fault, converted = await _run(prepare)
    prepared = With(
        serving,
        _validate_request=lambda _request: fault.result(),
        _convert_to_internal_request=lambda _request, _raw_request: converted.result(),
    )
    return await original(prepared, request, raw_request)


def _outcome(function: Callable[[], Any]) -> Future[Any]:
    """Return what a call returned or raised."""
    found: Future[Any] = Future()
    try:
        found.set_result(function())
    except Exception as error:
        found.set_exception(error)
    return found


async def _run(function: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_THREAD, function)


def _without_waiting(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return what `coroutine` returns, which waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise RuntimeError("this SGLang waits for something while it tokenises")
