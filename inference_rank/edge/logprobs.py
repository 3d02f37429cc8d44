# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of a request that SGLang's scheduler ended before its first token.

It sends none, although the request asks for some; what streams the answer counts them all the same,
does not find their number, and answers 500 in place of the reason.
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
