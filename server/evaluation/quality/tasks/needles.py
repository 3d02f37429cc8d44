# SPDX-License-Identifier: Apache-2.0
"""RULER's needle-in-a-haystack with any number of keys and values (arXiv:2404.06654, section 3)."""

from __future__ import annotations

from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.tokenizing import Prompt

from . import haystack
from .base import Task, TaskInputs, fitting, one_by_one, question_sample

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


def _task(
    name: str,
    title: str,
    definition: str,
    *,
    num_new_tokens: int = 16,
    num_keys: int = 1,
    num_values: int = 1,
) -> Task:
    """Return a task that finds one or several numbers, hidden in the text under a key.

    Of several keys one is asked for; or one key has several values. RULER's templates are used word
    for word. Deviation: RULER decodes 128 tokens whatever the answer is; here about as many as the
    answer has.
    """

    def sample(inputs: TaskInputs, index: int) -> Sample:
        generator = inputs.generator(name, index)
        keys = haystack.keys(generator, num_keys)
        values = haystack.numbers(generator, max(num_keys, num_values))
        key = keys[0]
        needles = list(map(haystack.needle, keys * num_values, values))
        depths = sorted(generator.sample(haystack.DEPTHS, len(needles)))
        generator.shuffle(order := list(needles))
        padding = haystack.sentences(inputs.corpus, generator)
        opening, question, prefix = _ONE if num_values == 1 else _SEVERAL

        def build(count: int) -> Prompt:
            pieces = haystack.insert(haystack.take(padding, count), order, depths)
            return inputs.prompts.build(
                opening + " ".join(pieces), question.format(key=key), prefix.format(key=key)
            )

        sizes = [len(piece) + 1 for piece in padding]
        prompt, _ = fitting(build, inputs.context_tokens, what=name, sizes=sizes)
        depth = round(depths[order.index(needles[0])], 3)
        return question_sample(
            inputs, index, prompt, values[:num_values],
            num_new_tokens=num_new_tokens, depth=depth, key=key,
        )  # fmt: skip

    return Task(
        name=name,
        title=title,
        definition=definition,
        source="RULER, arXiv:2404.06654",
        samples=one_by_one(sample),
    )


NEEDLE_TASKS = (
    _task(  # RULER's niah_single_2
        "niah_single",
        "Needle, single",
        "One number of seven digits is hidden in prose under a key, and asked for.",
    ),
    _task(  # niah_multikey_1
        "niah_multi_key",
        "Needle, multi-key",
        "Four numbers are hidden in prose under different keys; one of them is asked for.",
        num_keys=4,
    ),
    _task(  # niah_multivalue
        "niah_multi_value",
        "Needle, multi-value",
        "Four numbers are hidden in prose under one key; all of them are asked for.",
        num_new_tokens=64,
        num_values=4,
    ),
)
