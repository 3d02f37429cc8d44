# SPDX-License-Identifier: Apache-2.0
"""The bounds of one server: settings, with what the model decides filled in."""

from __future__ import annotations

from dataclasses import dataclass

from .settings import EdgeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """LoRA adapters that SGLang has loaded."""

    names: frozenset[str]
    """Of those that it was started with; no route loads others."""
    unserved: str = ""
    """Why no request may name one, and what to do; empty if it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the checks of a request compare with."""

    settings: EdgeSettings
    vocab_size: int
    """Token ids are below it. A larger one ends SGLang's scheduler."""
    context_tokens: int
    """Longest request, prompt and answer."""
    max_running_requests: int
    """Completions that SGLang decodes together."""
    model_names: frozenset[str]
    """Names that a request may give as its model."""
    has_grammars: bool = True
    """Whether SGLang has a grammar backend. Without one it ends such a request in the scheduler,
    and answers 500 to a stream with logprobs."""
    is_evaluation: bool = False
    """Whether forced tokens and emptying the prefix cache are open to all."""
    adapters: Adapters | None = None
    """Of a server with LoRA; else None."""

    @property
    def prompt_bytes(self) -> int:
        """Longest prompt in bytes of UTF-8."""
        return self.settings.prompt_bytes(self.context_tokens)

    @property
    def body_bytes(self) -> int:
        """Longest body in bytes."""
        return self.settings.body_bytes(self.context_tokens)

    @property
    def max_admitted(self) -> int:
        """Completions that run or wait, together."""
        return self.max_running_requests + self.settings.max_queued_requests
