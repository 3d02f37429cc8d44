# SPDX-License-Identifier: Apache-2.0
"""Real text that is forced or continued token by token: perplexity, attention mass, agreement."""

from __future__ import annotations

from functools import partial
from typing import Literal

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.quality.samples import Sample

from .base import Task, TaskInputs

SHORT_PROMPT = 256


def _samples(
    inputs: TaskInputs,
    *,
    mode: Literal["force", "probe", "continue"] = "force",
    prompt_tokens: int | None = None,
    is_long: bool = False,
) -> list[Sample]:
    length = prompt_tokens or inputs.context_tokens
    count = inputs.num_long_tokens if is_long else inputs.num_forced_tokens
    return [
        Sample(
            name=name,
            mode=mode,
            context_ids=ids[:length],
            forced_ids=ids[length:],
            num_new_tokens=count,
            notes={"tokens": length, "best": 1} if is_long else {"tokens": length},
        )
        for name, ids in windows(inputs, length + (0 if mode == "continue" else count))
    ]


FORCED_TASKS = (
    # Prompt log-likelihoods would be prefill's, which is dense under every policy. The first
    # forced token comes from prefill too and is left out.
    Task(
        name="perplexity",
        title="Perplexity",
        definition="Real text: context_tokens are prefilled, the next tokens are forced through "
        "decode one by one; the change of perplexity against dense is what counts.",
        source="teacher forcing, Williams & Zipser 1989",
        measure="perplexity",
        samples=_samples,
    ),
    # The policy decodes dense's tokens (forced) and says which one it would have taken. Up to the
    # first difference that is its own greedy continuation; after it, free running would compare
    # two different texts, forcing keeps comparing the same.
    Task(
        name="continuation",
        title="Continuation",
        definition="Dense continues real text greedily; counted are the tokens that a policy, "
        "given dense's text so far, would have chosen too, and where it first would not.",
        source="this project",
        measure="agreement",
        samples=partial(_samples, mode="continue"),
    ),
    # Measured in float64 on the inference rank, every eighth decode step, in all layers but the
    # exact ones: the softmax over all tokens of the true query, averaged over the query heads of a
    # KV head. The oracle takes as many tokens as are attended to, those with most mass; recall is
    # the share of its tokens that are attended to. Runs on a server of its own: it costs time.
    Task(
        name="mass",
        title="Attention mass",
        definition="Share of the true softmax mass that falls on attended tokens, and share of the "
        "oracle's tokens that are attended to, while real text is forced through decode.",
        source="this project; recall as in Quest, arXiv:2406.10774",
        measure="mass",
        samples=partial(_samples, mode="probe"),
    ),
)


def _long_generation(name: str, title: str, prompt_tokens: int | None) -> Task:
    """Return a task of thousands of tokens, to see whether the loss grows with what was decoded.

    Real text is forced, so that every policy decodes the same tokens. Its log-likelihood is told
    by quarters of the forced tokens, and so is the share of tokens at which the policy's best
    token is dense's. The prompt is the context, or `prompt_tokens`: then the resident set fills up
    while decoding.
    """
    prompt = f"{prompt_tokens} tokens" if prompt_tokens else "context_tokens"
    return Task(
        name=name,
        title=title,
        definition=f"Real text: {prompt} are prefilled, and thousands of tokens are forced through "
        "decode; the change of perplexity against dense, by quarters of them.",
        source="the load of AsyncSpade and SFI; forced text instead of sampling",
        measure="long",
        samples=partial(_samples, prompt_tokens=prompt_tokens, is_long=True),
    )


LONG_TASKS = (
    _long_generation("long_generation", "Long generation", None),
    _long_generation("long_generation_short", "Long generation, short prompt", SHORT_PROMPT),
)


def windows(inputs: TaskInputs, length: int) -> list[tuple[str, list[int]]]:
    """Return up to `num_samples` windows of `length` tokens, each of another place.

    The first window of every text comes first, then the second of each that is long enough. Raises
    `SettingsError` if no text is long enough.
    """
    tokenizer, found, longest = inputs.prompts.tokenizer, [], 0
    for name, text in inputs.corpus.texts.items():
        # Eight characters a token bound what has to be tokenised.
        ids = tokenizer.encode(text[: 8 * length * inputs.num_samples])
        longest = max(longest, len(ids))
        for i in range(min(inputs.num_samples, len(ids) // length)):
            part = ids[i * length : (i + 1) * length]
            found.append((i, name if i == 0 else f"{name}, part {i + 1}", part))
    if not found:
        raise SettingsError(
            f"corpus: the longest text has {longest} tokens, context_tokens + forced_tokens = "
            f"{length} are needed; lower --context-tokens or give longer texts with --corpus"
        )
    found.sort(key=lambda item: item[0])
    return [(name, part) for _, name, part in found[: inputs.num_samples]]
