# SPDX-License-Identifier: Apache-2.0
"""The bounds of one server: settings, with what the model decides filled in."""

from __future__ import annotations

from dataclasses import dataclass

from .settings import EdgeSettings

_BYTES_PER_TOKEN = 16
"""Default of max_prompt_bytes per token of context. Prose has about four bytes a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """LoRA adapters that SGLang has loaded."""

    names: frozenset[str]
    """Of those that it was started with; no route loads others."""
    unserved: str = ""
    """Why no request may name one, and what to do; empty if it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the checks of a request compare with; its methods are bounds of `values.Bound`."""

    settings: EdgeSettings
    vocab_size: int
    """Token ids are below it. A larger one ends SGLang's scheduler."""
    context_tokens: int
    """Longest request, prompt and answer."""
    max_running_requests: int
    """Completions that SGLang decodes together."""
    model_names: frozenset[str]
    """Names that a request may give as its model."""
    reasoning_efforts: tuple[str, ...]
    """Levels of ``reasoning_effort`` that SGLang has."""
    has_grammars: bool = True
    """Whether SGLang has a grammar backend. Without one it ends such a request in the scheduler,
    and answers 500 to a stream with logprobs."""
    has_gpu: bool = False
    """Whether SGLang runs on GPUs, which its profiler then knows."""
    has_suffixes: bool = False
    """Whether SGLang has a template for what lies between a prompt and its suffix."""
    is_evaluation: bool = False
    """Whether forced tokens and emptying the prefix cache are open to all."""
    adapters: Adapters | None = None
    """Of a server with LoRA; else None."""

    @property
    def body_bytes(self) -> int:
        """Longest body in bytes."""
        return self.settings.max_body_bytes or 2 * self.prompt_bytes() + (1 << 20)

    @property
    def max_admitted(self) -> int:
        """Completions that run or wait, together."""
        return self.max_running_requests + self.settings.max_queued_requests

    def prompt_bytes(self) -> int:
        """Longest prompt in bytes of UTF-8."""
        return self.settings.max_prompt_bytes or _BYTES_PER_TOKEN * self.context_tokens

    def context(self) -> int:
        """Tokens of a context."""
        return self.context_tokens

    def most_completions(self) -> int:
        """Completions of one request."""
        return min(self.settings.max_n, self.max_admitted)

    def most_logprobs(self) -> int:
        """Alternatives per token."""
        return min(self.settings.max_logprobs, self.vocab_size)

    def last_token_id(self) -> int:
        """Return the greatest token id."""
        return self.vocab_size - 1

    def most_stops(self) -> int:
        """Stop strings, and stop tokens."""
        return self.settings.max_stops

    def stop_bytes(self) -> int:
        """Bytes of a stop string."""
        return self.settings.max_stop_bytes

    def grammar_bytes(self) -> int:
        """Bytes of a schema, an expression or a grammar."""
        return self.settings.max_grammar_bytes
