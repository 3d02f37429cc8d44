# SPDX-License-Identifier: Apache-2.0
"""How likely a model finds real text, decoded token by token."""

from __future__ import annotations

from typing import ClassVar

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.quality.samples import Sample

from .base import Measure, Task, TaskInputs


class Perplexity(Task):
    """Teacher-forced perplexity: a long prefix is prefilled, what follows goes through decode.

    Prompt log-likelihoods would be prefill's, which is dense under every policy. The first forced
    token comes from prefill too and is left out.
    """

    name = "perplexity"
    title = "Perplexity"
    definition = (
        "Real text: context_tokens are prefilled, the next tokens are forced through decode one "
        "by one; the change of perplexity against dense is what counts."
    )
    source = "teacher forcing, Williams & Zipser 1989"
    measure: ClassVar[Measure] = "perplexity"

    def samples(self, inputs: TaskInputs) -> list[Sample]:
        """See `Task.samples`."""
        return [
            Sample(
                name=name,
                mode="force",
                context_ids=ids[: inputs.context_tokens],
                forced_ids=ids[inputs.context_tokens :],
                num_new_tokens=inputs.num_forced_tokens,
                notes={"tokens": inputs.context_tokens},
            )
            for name, ids in windows(inputs, inputs.context_tokens + inputs.num_forced_tokens)
        ]


def windows(inputs: TaskInputs, length: int) -> list[tuple[str, list[int]]]:
    """Return up to `num_samples` windows of `length` tokens, each of another place.

    The first window of every text comes first, then the second of each that is long enough.

    Raises
    ------
    SettingsError
        If no text is long enough.
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
