# SPDX-License-Identifier: Apache-2.0
"""RULER's needle-in-a-haystack with any number of keys and values (arXiv:2404.06654, section 3)."""

from __future__ import annotations

from abc import abstractmethod
from random import Random
from typing import NamedTuple

from tandemkv.server.quality.samples import Sample
from tandemkv.server.quality.tokenizing import Prompt

from . import haystack
from .base import Task, TaskInputs, fitting

_ONE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n",
    "\nWhat is the special magic number for {key} mentioned in the provided text?",
    " The special magic number for {key} mentioned in the provided text is",
)
_SEVERAL = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n",
    "\nWhat are all the special magic numbers for {key} mentioned in the provided text?",
    " The special magic numbers for {key} mentioned in the provided text are",
)


class Hidden(NamedTuple):
    """Needles of one sample; those of the key asked for come with their values first."""

    key: str
    values: list[str]
    needles: list[str]


class NeedleTask(Task):
    """Finds one or several numbers that were hidden in the text under a key.

    A subclass says what is hidden. RULER's templates are used word for word. Deviation: RULER
    decodes 128 tokens whatever the answer is; here about as many as the answer has.
    """

    source = "RULER, arXiv:2404.06654"
    num_new_tokens: int

    @abstractmethod
    def hide(self, generator: Random) -> Hidden:
        """Choose keys and values."""

    def samples(self, inputs: TaskInputs) -> list[Sample]:
        """See `Task.samples`."""
        return [self._sample(inputs, index) for index in range(inputs.num_samples)]

    def _sample(self, inputs: TaskInputs, index: int) -> Sample:
        generator = inputs.generator(self.name, index)
        hidden = self.hide(generator)
        depths = sorted(generator.sample(haystack.DEPTHS, len(hidden.needles)))
        generator.shuffle(order := list(hidden.needles))
        padding = haystack.sentences(inputs.corpus, generator)
        opening, question, prefix = _ONE if len(hidden.values) == 1 else _SEVERAL

        def build(count: int) -> Prompt:
            pieces = haystack.insert(haystack.take(padding, count), order, depths)
            return inputs.prompts.build(
                opening + " ".join(pieces),
                question.format(key=hidden.key),
                prefix.format(key=hidden.key),
            )

        prompt, _ = fitting(build, inputs.context_tokens, what=self.name)
        place = order.index(haystack.needle(hidden.key, hidden.values[0]))
        return Sample(
            name=f"{index}",
            mode="generate",
            context_ids=prompt.context_ids,
            question_ids=prompt.question_ids,
            num_new_tokens=inputs.new_tokens(self.num_new_tokens),
            answers=hidden.values,
            scorer="string_match_all",
            notes={"depth": round(depths[place], 3), "tokens": len(prompt), "key": hidden.key},
        )
