# SPDX-License-Identifier: Apache-2.0
"""Tokenise beside the event loop of the HTTP process.

SGLang tokenises on it: while one caller's long prompt is read, no stream moves and no probe is
answered. Here one thread does it for all, so that prompts are tokenised one after the other; Rust
releases the interpreter lock meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="tandemkv-tokenizer")


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
    """Run what answers ``/tokenize`` and ``/detokenize`` in the thread (AROUND hook)."""
    return await _run(lambda: _without_waiting(original(serving, *args, **kwargs)))


async def handle_request(
    original: Callable[..., Any], serving: Any, request: Any, raw_request: Any
) -> Any:
    """Apply chat templates, which tokenise, in the thread (AROUND hook)."""

    def convert() -> Callable[[], Any]:
        try:
            found = serving._convert_to_internal_request(request, raw_request)
        except Exception as error:
            return _raising(error)
        return lambda: found

    if serving._validate_request(request):
        return await original(serving, request, raw_request)  # which says what is wrong
    return await original(_Converted(serving, await _run(convert)), request, raw_request)


class _Converted:
    """SGLang's serving object, with one call already made."""

    def __init__(self, serving: Any, outcome: Callable[[], Any]) -> None:
        self._serving = serving
        self._outcome = outcome

    def __getattr__(self, name: str) -> Any:
        return getattr(self._serving, name)

    def _convert_to_internal_request(self, _request: Any, _raw_request: Any) -> Any:
        return self._outcome()


def _raising(error: Exception) -> Callable[[], Any]:
    def outcome() -> Any:
        raise error

    return outcome


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
