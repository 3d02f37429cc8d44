# SPDX-License-Identifier: Apache-2.0
"""What a task is, and what its samples are made from."""

from __future__ import annotations

import bisect
import itertools
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.corpus import Corpus
from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.tokenizing import Prompt, PromptBuilder

Measure = Literal["score", "perplexity", "agreement", "mass", "long"]
"""How the answers of a task are summarised."""
_MOST_PIECES = 1 << 22
_GUESSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInputs:
    """What samples are made from."""

    prompts: PromptBuilder
    corpus: Corpus = field(hash=False)  # a mapping has none
    context_tokens: int
    """Length that a prompt comes close to, and never exceeds."""
    num_samples: int
    """Samples of the task, or as many as there are texts or lines if these are fewer."""
    num_forced_tokens: int = 128
    """Tokens that go through decode where a text is forced or continued."""
    num_long_tokens: int = 8000
    """The same, for tasks of long generation."""
    seed: int = 0
    """Equal seeds give equal samples."""
    max_new_tokens: int | None = None
    """Overrides what a task decodes for its answer."""

    def generator(self, task: str, index: int) -> random.Random:
        """Return the random state of one sample; independent of how many there are."""
        return random.Random(f"{self.seed} {task} {index}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task.

    `samples` makes the samples, and raises `SettingsError` if the corpus or the length does not
    allow it.
    """

    name: str
    """Key on the command line."""
    title: str
    definition: str
    source: str
    """For the report: what it is, in one sentence, and after whom."""
    samples: Callable[[TaskInputs], list[Sample]]
    measure: Measure = "score"
    """How answers are summarised."""
    context_tokens: int | None = None
    """Length of its prompts, None for that of the inputs."""


def one_by_one(sample: Callable[[TaskInputs, int], Sample]) -> Callable[[TaskInputs], list[Sample]]:
    """Return what makes samples singly, each of its number."""

    def samples(inputs: TaskInputs) -> list[Sample]:
        # A fast tokenizer works beside Python, and takes most of the time.
        is_fast = getattr(inputs.prompts.tokenizer, "is_fast", False)
        with ThreadPoolExecutor((os.cpu_count() or 1) if is_fast else 1) as pool:
            return list(pool.map(lambda i: sample(inputs, i), range(inputs.num_samples)))

    return samples


def question_sample(
    inputs: TaskInputs,
    index: int,
    prompt: Prompt,
    answers: list[str],
    *,
    num_new_tokens: int,
    scorer: str = "string_match_all",
    **notes: str | int | float,
) -> Sample:
    """Return the sample number `index` of a task that asks, and scores the answer.

    `num_new_tokens` are the task's own, which the user may have replaced.
    """
    return Sample(
        name=f"{index}",
        mode="generate",
        context_ids=prompt.context_ids,
        question_ids=prompt.question_ids,
        num_new_tokens=inputs.max_new_tokens or num_new_tokens,
        answers=answers,
        scorer=scorer,
        notes={"tokens": len(prompt), **notes},
    )


def fitting(
    build: Callable[[int], Prompt], limit: int, *, what: str, sizes: Sequence[int] = (1,)
) -> tuple[Prompt, int]:
    """Return the longest prompt of at most `limit` tokens, and the number that made it.

    `build` makes a prompt with n pieces of padding; longer with n, n = 0 being the shortest.
    `sizes` are lengths of the pieces in characters, or in any other unit, and begin anew when they
    run out: the nearer they are to being proportional to tokens, the fewer prompts are made. The
    error names `what`. Raises `SettingsError` if the prompt without padding is too long already, or
    a piece is so long that the prompt has less than half of `limit`.
    """
    known = {0: build(0)}
    if len(known[0]) > limit:
        raise SettingsError(
            f"{what}: needs {len(known[0])} tokens without any padding, "
            f"context_tokens={limit} is too short; raise --context-tokens"
        )
    totals = [0, *itertools.accumulate(sizes)]  # of the first pieces, until they begin anew
    round_pieces, round_size = len(sizes), totals[-1]

    def fits(count: int) -> bool:
        if count not in known:
            known[count] = build(count)
        return len(known[count]) <= limit

    guess = 1
    for _ in range(_GUESSES):
        fits(guess)
        rounds, rest = divmod(guess, round_pieces)
        rate = (len(known[guess]) - len(known[0])) / (rounds * round_size + totals[rest])
        if rate <= 0:
            guess *= 2
            continue
        wanted_rounds, size = divmod((limit - len(known[0])) / rate, round_size)
        guess = max(1, int(wanted_rounds) * round_pieces + bisect.bisect_right(totals, size) - 1)
    low, high, step = guess, guess, 1
    while low and not fits(low):
        low, high, step = max(0, low - step), low, 2 * step
    while low == high or (fits(high) and high < _MOST_PIECES):
        low, high, step = high, high + step, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if 2 * len(known[low]) < limit:
        raise SettingsError(
            f"{what}: the prompt has {len(known[low])} tokens, and the next piece of text is more "
            f"than context_tokens={limit} leaves; give texts with spaces or sentences"
        )
    return known[low], low
