# SPDX-License-Identifier: Apache-2.0
"""The seam between a task and the runner."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.corpus import Corpus
from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.tokenizing import Prompt, PromptBuilder

Measure = Literal["score", "perplexity", "agreement", "mass", "long"]
"""How the answers of a task are summarised."""
_MOST_PIECES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInputs:
    """What samples are made from.

    Attributes
    ----------
    context_tokens : int
        Length that a prompt comes close to, and never exceeds.
    num_samples : int
        Samples of the task, or as many as there are texts or lines if these are fewer.
    num_forced_tokens : int
        Tokens that go through decode where a text is forced or continued.
    num_long_tokens : int
        The same, for tasks of long generation.
    seed : int
        Equal seeds give equal samples.
    max_new_tokens : int or None
        Overrides what a task decodes for its answer.
    """

    prompts: PromptBuilder
    corpus: Corpus
    context_tokens: int
    num_samples: int
    num_forced_tokens: int = 128
    num_long_tokens: int = 8000
    seed: int = 0
    max_new_tokens: int | None = None

    def generator(self, task: str, index: int) -> random.Random:
        """Return the random state of one sample; independent of how many there are."""
        return random.Random(f"{self.seed} {task} {index}")

    def new_tokens(self, default: int) -> int:
        """Tokens to decode for an answer."""
        return default if self.max_new_tokens is None else self.max_new_tokens


class Task(ABC):
    """A task.

    Attributes
    ----------
    name : str
        Key on the command line.
    title, definition, source : str
        For the report: what it is, in one sentence, and after whom.
    measure : str
        How answers are summarised.
    context_tokens : int or None
        Length of its prompts, None for that of the inputs.
    """

    name: str
    title: str
    definition: str
    source: str
    measure: ClassVar[Measure] = "score"
    context_tokens: ClassVar[int | None] = None

    def num_forced(self, forced: int, long: int) -> int:
        """Tokens forced a text, of what the user gave for tasks of either kind."""
        return long if self.measure == "long" else forced

    @abstractmethod
    def samples(self, inputs: TaskInputs) -> list[Sample]:
        """Make the samples.

        Raises
        ------
        SettingsError
            If the corpus or the length does not allow it.
        """


class GeneratedTask(Task):
    """A task whose samples are made one by one, each with a random state of its own."""

    @abstractmethod
    def sample(self, inputs: TaskInputs, index: int) -> Sample:
        """Make one sample."""

    def samples(self, inputs: TaskInputs) -> list[Sample]:
        """See `Task.samples`."""
        return [self.sample(inputs, index) for index in range(inputs.num_samples)]


def question_sample(
    index: int,
    prompt: Prompt,
    *,
    num_new_tokens: int,
    answers: list[str],
    scorer: str,
    notes: dict[str, str | int | float],
) -> Sample:
    """Return the sample number `index` of a task that asks and scores the answer."""
    return Sample(
        name=f"{index}",
        mode="generate",
        context_ids=prompt.context_ids,
        question_ids=prompt.question_ids,
        num_new_tokens=num_new_tokens,
        answers=answers,
        scorer=scorer,
        notes=notes,
    )


def fitting(build: Callable[[int], Prompt], limit: int, *, what: str) -> tuple[Prompt, int]:
    """Return the longest prompt of at most `limit` tokens, and the number that made it.

    Parameters
    ----------
    build : callable
        Makes a prompt with n pieces of padding; longer with n, n = 0 being the shortest.
    limit : int
        Tokens.
    what : str
        Named in the error.

    Raises
    ------
    SettingsError
        If the prompt without padding is too long already.
    """
    shortest = build(0)
    if len(shortest) > limit:
        raise SettingsError(
            f"{what}: needs {len(shortest)} tokens without any padding, "
            f"context_tokens={limit} is too short; raise --context-tokens"
        )
    # Pieces are of like length, so sizes in between are guessed; halving bounds the steps.
    longest, low, high, above = shortest, 0, 1, build(1)
    while len(above) <= limit and high < _MOST_PIECES:
        per_piece = (len(above) - len(shortest)) / high
        longest, low = above, high
        high += max(1, int((limit - len(above)) / per_piece)) if per_piece else high
        above = build(high)
    for step in itertools.count():
        if high - low <= 1:
            return longest, low
        guess = (limit - len(longest)) / max(1, len(above) - len(longest))
        share = 0.5 if step % 3 == 2 else guess
        middle = min(high - 1, low + max(1, int(share * (high - low))))
        found = build(middle)
        if len(found) <= limit:
            longest, low = found, middle
        else:
            above, high = found, middle
    raise AssertionError("unreachable")
