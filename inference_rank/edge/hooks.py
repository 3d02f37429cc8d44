# SPDX-License-Identifier: Apache-2.0
"""Where the edge reaches into SGLang's HTTP process; `inference_rank.hooks` registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import logprobs, tokenizing
from .install import decide_request_auth

_OPENAI = "sglang.srt.entrypoints.openai"

AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.utils.auth.decide_request_auth": decide_request_auth,
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_texts": (
        tokenizing.tokenize_texts
    ),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.convert_logprob_style": (
        logprobs.convert_logprob_style
    ),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.detokenize_logprob_tokens": (
        logprobs.detokenize_logprob_tokens
    ),
    f"{_OPENAI}.serving_base.OpenAIServingBase.handle_request": tokenizing.handle_request,
    f"{_OPENAI}.serving_tokenize.OpenAIServingTokenize._handle_non_streaming_request": (
        tokenizing.handle_tokenize
    ),
    f"{_OPENAI}.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request": (
        tokenizing.handle_tokenize
    ),
}
