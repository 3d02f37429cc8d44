# SPDX-License-Identifier: Apache-2.0
"""RULER's ``vt``: one chain of assignments, four hops, in a repeated sentence.

Templates are used word for word. As in RULER, one solved example with names of three letters
precedes the text. Deviation: the example has five sentences of noise, whatever the length.
"""

from __future__ import annotations

import itertools
import string
from random import Random

from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.tokenizing import Prompt

from . import haystack
from .base import Task, TaskInputs, fitting, one_by_one, question_sample

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
