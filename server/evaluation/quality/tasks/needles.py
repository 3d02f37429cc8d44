# SPDX-License-Identifier: Apache-2.0
"""RULER's needle-in-a-haystack with any number of keys and values, and its variable tracking.

Both are of arXiv:2404.06654, section 3. RULER's templates are used word for word.
"""

from __future__ import annotations

import itertools
import string
from random import Random

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

    Of several keys one is asked for; or one key has several values. Deviation: RULER decodes 128
    tokens whatever the answer is; here about as many as the answer has.
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


NUM_HOPS = 4
_OPENING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
)
_QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are: "
)
_EXAMPLE_VALUE = "12345"
_EXAMPLE_DEPTHS = tuple(i / NUM_HOPS for i in range(NUM_HOPS + 1))
_NAME = "variable_tracking"


def _sample(inputs: TaskInputs, index: int) -> Sample:
    """Return RULER's ``vt``: one chain of assignments, four hops, in a repeated sentence.

    As in RULER, one solved example with names of three letters precedes the text. Deviation: the
    example has five sentences of noise, whatever the length.
    """
    generator = inputs.generator(_NAME, index)
    example_names, example = _chain(generator, _EXAMPLE_VALUE, letters=3)
    value = str(generator.randint(10_000, 99_999))
    names, assignments = _chain(generator, value, letters=5)
    depths = sorted(generator.sample(haystack.DEPTHS, len(assignments)))
    example_text = " ".join(haystack.insert([haystack.NOISE] * 5, example, _EXAMPLE_DEPTHS))
    solved = (
        f"{_OPENING}{example_text}{_QUESTION.format(value=_EXAMPLE_VALUE)}"
        f"{_PREFIX.format(count=len(names), value=_EXAMPLE_VALUE)}{' '.join(example_names)}\n\n"
    )

    def build(repeats: int) -> Prompt:
        text = "\n".join(haystack.insert([haystack.NOISE] * repeats, assignments, depths))
        return inputs.prompts.build(
            solved + _OPENING + text,
            _QUESTION.format(value=value),
            _PREFIX.format(count=len(names), value=value).rstrip(),
        )

    prompt, _ = fitting(build, inputs.context_tokens, what=_NAME)
    return question_sample(inputs, index, prompt, names, num_new_tokens=40, value=value)


def _chain(generator: Random, value: str, *, letters: int) -> tuple[list[str], list[str]]:
    """Return names, and their assignments in order."""
    names: dict[str, None] = {}
    while len(names) <= NUM_HOPS:
        names["".join(generator.choices(string.ascii_uppercase, k=letters))] = None
    chain = list(names)
    assignments = [f"VAR {name} = VAR {source}" for source, name in itertools.pairwise(chain)]
    return chain, [f"VAR {chain[0]} = {value}", *assignments]


VARIABLE_TRACKING = Task(
    name=_NAME,
    title="Variable tracking",
    definition="A number is assigned to a variable and passed on four times, at random depths of a "
    "repeated sentence; all five variables are asked for.",
    source="RULER, arXiv:2404.06654",
    samples=one_by_one(_sample),
)
