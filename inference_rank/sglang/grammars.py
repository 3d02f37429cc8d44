# SPDX-License-Identifier: Apache-2.0
"""A request whose grammar leaves no token ends alone.

Where every logit of a row is ``-inf``, its probabilities are NaN. SGLang's sampler then ends the
scheduler, and all requests with it.
"""

from __future__ import annotations

from typing import Any

import torch


def leave_a_token(
    _sampler: Any, logits_output: Any, sampling_info: Any, *_: Any, **__: Any
) -> None:
    """Let each row have a token to sample (BEFORE hook on `Sampler.forward`).

    ``next_token_logits [B, vocabulary]`` are written in place; nothing waits for the GPU.
    ``min_new_tokens`` forbids to end where the grammar allows nothing else: the grammar has the
    last word. Where it allows nothing at all, any token will do: the grammar refuses it, and SGLang
    ends that request.
    """
    mask = sampling_info.grammar_mask
    if mask is None:
        return
    logits = logits_output.next_token_logits
    _fill_empty(logits)
    mask.apply(logits)
    _fill_empty(logits)


def _fill_empty(logits: torch.Tensor) -> None:
    """Make all tokens of a row equally likely if none is possible."""
    logits.masked_fill_(torch.isneginf(logits).all(dim=-1, keepdim=True), 0.0)
