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
from dataclasses import dataclass
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
    """Check tools, and apply chat templates, which tokenise, in the thread (AROUND hook)."""

    def validate() -> str | None:
        found: str | None = serving._validate_request(request)
        return found

    def convert() -> Any:
        return serving._convert_to_internal_request(request, raw_request)

    def prepare() -> tuple[Outcome, Outcome]:
        fault = _outcome(validate)
        is_right = fault.error is None and not fault.value
        return fault, _outcome(convert) if is_right else fault

    return await original(_Prepared(serving, *await _run(prepare)), request, raw_request)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call returned or raised."""

    value: Any = None
    error: Exception | None = None

    def again(self) -> Any:
        """Return or raise it."""
        if self.error is not None:
            raise self.error
        return self.value


class _Prepared:
    """SGLang's serving object, with two calls already made."""

    def __init__(self, serving: Any, fault: Outcome, converted: Outcome) -> None:
        self._serving = serving
        self._fault, self._converted = fault, converted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._serving, name)

    def _validate_request(self, _request: Any) -> Any:
        return self._fault.again()

    def _convert_to_internal_request(self, _request: Any, _raw_request: Any) -> Any:
        return self._converted.again()


def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(function())
    except Exception as error:
        return Outcome(error=error)


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
