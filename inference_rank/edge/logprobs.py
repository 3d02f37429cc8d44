# SPDX-License-Identifier: Apache-2.0
"""Log probabilities: of a request that was ended early, and the text of many tokens.

When SGLang's scheduler ends a request before its first token it sends none, although the request
asks for some; what streams the answer counts them all the same, does not find their number, and
answers 500 in place of the reason.

SGLang decodes the token of each log probability anew, on the event loop of the HTTP process:
seconds for a prompt's, in which no stream moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def convert_logprob_style(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    top_logprobs_num: int,
    token_ids_logprob: list[int] | None,
    return_text_in_logprobs: bool,
    recv_obj: Any,
    recv_obj_index: int,
    **more: Any,
) -> None:
    """Say that there are as many as came before: none (AROUND hook of TokenizerManager's)."""
    given = (meta_info, state, top_logprobs_num, token_ids_logprob, return_text_in_logprobs)
    if recv_obj.input_token_logprobs_val is None:
        manager.add_logprob_to_meta_info(*given, **more)
    else:
        original(manager, *given, recv_obj, recv_obj_index, **more)


_texts: dict[int, str] = {}
"""Of each token so far; the model has no more than its vocabulary."""


def detokenize_logprob_tokens(
    original: Callable[..., Any],
    manager: Any,
    values: list[float],
    ids: list[int],
    decode_to_text: bool,
) -> Any:
    """Decode each token once (AROUND hook of TokenizerManager's)."""
    if not decode_to_text:
        return original(manager, values, ids, decode_to_text)
    new = list(set(ids).difference(_texts))
    if new:
        _texts.update(zip(new, manager.tokenizer.batch_decode([[i] for i in new]), strict=True))
    return list(zip(values, ids, map(_texts.__getitem__, ids), strict=False))
