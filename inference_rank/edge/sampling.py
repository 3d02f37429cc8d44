# SPDX-License-Identifier: Apache-2.0
"""What a request may ask of the sampler, for SGLang's names and for OpenAI's."""

from __future__ import annotations

from .limits import Limits
from .schemas import json_schema, regex
from .values import (
    Check,
    boolean,
    integer,
    list_of,
    logit_bias,
    mapping,
    number,
    one_or_list,
    string,
)

_LEAST_INT64, _MOST_INT64 = -(1 << 63), (1 << 63) - 1
_ALL_TOKENS = 1 << 30  # SGLang's own word for the whole vocabulary

LEAST_REPETITION_PENALTY = 0.01
"""Smaller ones overflow when logits are divided by them, and SGLang's scheduler ends."""
MOST_TEMPERATURE = 10.0

# An empty stop string would end every answer before it begins.
_STOP = one_or_list(string(Limits.stop_bytes, least=1), Limits.most_stops, least=0)

SAMPLING: dict[str, Check] = {
    "temperature": number(0, MOST_TEMPERATURE),
    "top_p": number(0, 1, above=True),
    "top_k": integer(1, _ALL_TOKENS, also=(-1,)),
    "min_p": number(0, 1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(LEAST_REPETITION_PENALTY, 2),
    "logit_bias": logit_bias,
    "n": integer(1, Limits.most_completions),
    "stop": _STOP,
    "stop_token_ids": list_of(integer(0, Limits.last_token_id), Limits.most_stops),
    "ignore_eos": boolean,
    "no_stop_trim": boolean,
    "skip_special_tokens": boolean,
    "json_schema": json_schema,
    "regex": regex,
    "ebnf": string(Limits.grammar_bytes),
}
"""Under these names in every route. ``stop_regex`` is not there: SGLang matches it, backtracking,
in its scheduler, where one expression can take for ever."""

SEED = integer(_LEAST_INT64, _MOST_INT64)

NATIVE_SAMPLING: dict[str, Check] = {
    **SAMPLING,
    "max_new_tokens": integer(0, Limits.context),
    "min_new_tokens": integer(0, Limits.context),
    "sampling_seed": SEED,
    "spaces_between_special_tokens": boolean,
    "stream_interval": integer(1, 4096),
}

_FORCED = list_of(integer(0, Limits.last_token_id), Limits.context)

EVALUATION_SAMPLING: dict[str, Check] = {
    **NATIVE_SAMPLING,
    "custom_params": mapping(1 << 24, {"forced_token_ids": _FORCED}),
}
"""With ``--evaluation``: forced tokens travel in ``custom_params``. One that is no token of the
model would end SGLang's scheduler."""
