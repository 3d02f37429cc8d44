# SPDX-License-Identifier: Apache-2.0
"""Forced continuations, for evaluation: a request decodes the tokens that it was given.

Prompt logprobs come from prefill, which is dense, and prove nothing about sparse decode. With
``evaluation`` on, a request whose ``sampling_params.custom_params`` has ``forced_token_ids``
decodes those tokens one at a time through the serving path; its output logprobs are those of
the forced tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tandemkv.inference_rank import runtime as runtime_module


@runtime_module.around
def around_sampler(
    runtime: Any, original: Callable[..., torch.Tensor], sampler: Any, logits_output: Any,
    *args: Any, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """Replace the sampled ids, and their logprobs, of requests that force theirs."""
    if not runtime.settings.evaluation:
        return original(sampler, logits_output, *args, **kwargs)
    forced = [
        _forced_token(req, length)
        for req, length in zip(runtime.running_reqs, runtime.running_lengths, strict=True)
    ]
    if all(token is None for token in forced):
        return original(sampler, logits_output, *args, **kwargs)
    logprobs = torch.log_softmax(logits_output.next_token_logits.float(), dim=-1)
    ids = original(sampler, logits_output, *args, **kwargs)
    for i, token in enumerate(forced):
        if token is None:
            continue
        ids[i] = token
        runtime.counters.forced_tokens_total += 1
        if logits_output.next_token_logprobs is not None:
            logits_output.next_token_logprobs[i] = logprobs[i, token]
    return ids


def _forced_token(req: Any, length: int) -> int | None:
    """Return what must follow the request's first `length` tokens.

    Not counted by its ``output_ids``: under overlap scheduling the last step's token is appended
    after this step was launched.
    """
    params = getattr(req.sampling_params, "custom_params", None)
    tokens = params.get("forced_token_ids") if isinstance(params, dict) else None
    done = length - len(req.origin_input_ids)  # negative before the end of a chunked prompt
    if not isinstance(tokens, list) or not 0 <= done < len(tokens):
        return None
    return int(tokens[done])
