# SPDX-License-Identifier: Apache-2.0
"""Follow a chain of assignments through the text."""

from __future__ import annotations

import itertools
import string
from random import Random

from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.tokenizing import Prompt

from . import haystack
from .base import GeneratedTask, TaskInputs, fitting, question_sample

NUM_HOPS = 4
_OPENING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
)
_QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are: "
)


class VariableTracking(GeneratedTask):
    """RULER's ``vt``: one chain, four hops, in a repeated sentence; templates word for word.

    As in RULER, one solved example with names of three letters precedes the text. Deviation: the
    example has five sentences of noise, whatever the length.
    """

    name = "variable_tracking"
    title = "Variable tracking"
    definition = (
        "A number is assigned to a variable and passed on four times, at random depths of a "
        "repeated sentence; all five variables are asked for."
    )
    source = "RULER, arXiv:2404.06654"
    num_new_tokens = 40

    def sample(self, inputs: TaskInputs, index: int) -> Sample:
        """See `GeneratedTask.sample`."""
        generator = inputs.generator(self.name, index)
        example_names, example = _chain(generator, "12345", letters=3)
        example_text = " ".join(haystack.insert([haystack.NOISE] * 5, example, _DEPTHS))
        value = str(generator.randint(10_000, 99_999))
        names, assignments = _chain(generator, value, letters=5)
        depths = sorted(generator.sample(haystack.DEPTHS, len(assignments)))
        count = len(names)
        example_full = (
            f"{_OPENING}{example_text}{_QUESTION.format(value='12345')}"
            f"{_PREFIX.format(count=count, value='12345')}{' '.join(example_names)}\n\n"
        )

        def build(repeats: int) -> Prompt:
            text = "\n".join(haystack.insert([haystack.NOISE] * repeats, assignments, depths))
            return inputs.prompts.build(
                example_full + _OPENING + text,
                _QUESTION.format(value=value),
                _PREFIX.format(count=count, value=value).rstrip(),
            )

        prompt, _ = fitting(build, inputs.context_tokens, what=self.name)
        return question_sample(
            index,
            prompt,
            num_new_tokens=inputs.new_tokens(self.num_new_tokens),
            answers=names,
            scorer="string_match_all",
            notes={"tokens": len(prompt), "value": value},
        )


_DEPTHS = tuple(i / NUM_HOPS for i in range(NUM_HOPS + 1))


def _chain(generator: Random, value: str, *, letters: int) -> tuple[list[str], list[str]]:
    """Return names, and their assignments in order."""
    names: dict[str, None] = {}
    while len(names) <= NUM_HOPS:
        names["".join(generator.choices(string.ascii_uppercase, k=letters))] = None
    chain = list(names)
    assignments = [f"VAR {chain[0]} = {value}"]
    for source, name in itertools.pairwise(chain):
        assignments.append(f"VAR {name} = VAR {source}")
    return chain, assignments
