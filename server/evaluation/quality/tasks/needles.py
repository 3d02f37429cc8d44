# SPDX-License-Identifier: Apache-2.0
"""RULER's needle-in-a-haystack with any number of keys and values (arXiv:2404.06654, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.tokenizing import Prompt

from . import haystack
from .base import GeneratedTask, TaskInputs, fitting, question_sample

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleTask(GeneratedTask):
    """Finds one or several numbers that were hidden in the text under a key.

    Of several keys one is asked for; or one key has several values. RULER's templates are used word
    for word. Deviation: RULER decodes 128 tokens whatever the answer is; here about as many as the
    answer has.
    """

    name: str
    title: str
    definition: str
    source: str = "RULER, arXiv:2404.06654"
    num_new_tokens: int
    num_keys: int = 1
    num_values: int = 1

    def sample(self, inputs: TaskInputs, index: int) -> Sample:
        """See `GeneratedTask.sample`."""
        generator = inputs.generator(self.name, index)
        count = max(self.num_keys, self.num_values)
        keys, values = haystack.keys(generator, self.num_keys), haystack.numbers(generator, count)
        key, answers = keys[0], values[: self.num_values]
        needles = list(map(haystack.needle, keys * self.num_values, values))
        depths = sorted(generator.sample(haystack.DEPTHS, len(needles)))
        generator.shuffle(order := list(needles))
        padding = haystack.sentences(inputs.corpus, generator)
        opening, question, prefix = _ONE if self.num_values == 1 else _SEVERAL

        def build(count: int) -> Prompt:
            pieces = haystack.insert(haystack.take(padding, count), order, depths)
            return inputs.prompts.build(
                opening + " ".join(pieces),
                question.format(key=key),
                prefix.format(key=key),
            )

        sizes = [len(piece) + 1 for piece in padding]
        prompt, _ = fitting(build, inputs.context_tokens, what=self.name, sizes=sizes)
        place = order.index(needles[0])
        return question_sample(
            index,
            prompt,
            num_new_tokens=inputs.new_tokens(self.num_new_tokens),
            answers=answers,
            scorer="string_match_all",
            notes={"depth": round(depths[place], 3), "tokens": len(prompt), "key": key},
        )


NEEDLE_TASKS = (
    NeedleTask(  # RULER's niah_single_2
        name="niah_single",
        title="Needle, single",
        definition="One number of seven digits is hidden in prose under a key, and asked for.",
        num_new_tokens=16,
    ),
    NeedleTask(  # niah_multikey_1
        name="niah_multi_key",
        title="Needle, multi-key",
        definition="Four numbers are hidden in prose under different keys; one of them is asked "
        "for.",
        num_new_tokens=16,
        num_keys=4,
    ),
    NeedleTask(  # niah_multivalue
        name="niah_multi_value",
        title="Needle, multi-value",
        definition="Four numbers are hidden in prose under one key; all of them are asked for.",
        num_new_tokens=64,
        num_values=4,
    ),
)
