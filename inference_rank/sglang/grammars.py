# SPDX-License-Identifier: Apache-2.0
"""A request whose grammar leaves no token ends alone.

Where every logit of a row is ``-inf``, its probabilities are NaN. SGLang's sampler then ends the
scheduler, and all requests with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def around_logits_bias(
    original: Callable[..., Any], info: Any, logits: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Let each row have a token to sample (AROUND hook on what masks ``logits [B, vocabulary]``).

    They are written in place; nothing waits for the GPU. ``min_new_tokens`` forbids to end where
    the grammar allows nothing else: the grammar has the last word. Where it allows nothing at all,
    any token will do: the grammar refuses it, and SGLang ends that request. `info` forgets its mask
    afterwards, so that the sampler cannot know.
    """
    found = original(info, logits, *args, **kwargs)
    mask = info.grammar_mask
    if mask is not None:
        _fill_empty(logits)
        mask.apply(logits)
        _fill_empty(logits)
    return found


def _fill_empty(logits: torch.Tensor) -> None:
    """Make all tokens of a row equally likely if none is possible."""
    logits.masked_fill_(torch.isneginf(logits).all(dim=-1, keepdim=True), 0.0)
