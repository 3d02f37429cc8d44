# SPDX-License-Identifier: Apache-2.0
"""Retrieval tasks whose answers are numbers: keys in text, records, variables, documents.

Small models misspell words that they have found; a number is right or wrong.
"""

from __future__ import annotations

from random import Random

from . import haystack
from .multi_document_qa import names_of_people
from .shared_context import QUESTIONS, Facts, Question, shared_context_task

_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def _eight_keys(generator: Random, _: int) -> Facts:
    keys = haystack.keys(generator, QUESTIONS)
    values = haystack.numbers(generator, QUESTIONS)
    return Facts(
        [haystack.needle(key, value) for key, value in zip(keys, values, strict=True)],
        [
            Question(
                f"\nWhat is the special magic number for {key} mentioned in the provided text?",
                f" The special magic number for {key} mentioned in the provided text is",
                value,
            )
            for key, value in zip(keys, values, strict=True)
        ],
    )


def _records(generator: Random, count: int) -> Facts:
    keys = [str(n) for n in generator.sample(range(100_000, 1_000_000), count)]
    values = haystack.numbers(generator, count)
    size = count // QUESTIONS  # even shares of the list, so that all depths are asked for
    asked = [i * size + generator.randrange(size) for i in range(QUESTIONS)]
    return Facts(
        [f"record {key}: {value}" for key, value in zip(keys, values, strict=True)],
        [
            Question(
                f"\nWhat is stored for record {keys[i]}? Answer with the number.",
                f" The number stored for record {keys[i]} is",
                values[i],
            )
            for i in asked
        ],
        needed=frozenset(asked),
    )


def _variable_value(generator: Random, _: int) -> Facts:
    letters = generator.sample([a + b for a in _LETTERS for b in _LETTERS], 3 * QUESTIONS)
    names = [f"X{letter}{i}" for i, letter in enumerate(letters)]
    chains = list(zip(names[::3], names[1::3], names[2::3], strict=True))
    values = [str(n) for n in generator.sample(range(10_000, 100_000), QUESTIONS)]
    hops = [
        [f"VAR {first} = {value}" for (first, _, _), value in zip(chains, values, strict=True)],
        [f"VAR {second} = VAR {first}" for first, second, _ in chains],
        [f"VAR {last} = VAR {second}" for _, second, last in chains],
    ]
    for lines in hops:
        generator.shuffle(lines)
    return Facts(
        [line for lines in hops for line in lines],
        [
            Question(
                f"\nQuestion: What is the value of the variable {last} in the text above? Answer "
                "with the number.",
                f" The value of the variable {last} is",
                value,
            )
            for (_, _, last), value in zip(chains, values, strict=True)
        ],
    )


def _document_numbers(generator: Random, count: int) -> Facts:
    """Every other question needs two documents: a person's firm, and the firm's number."""
    count = max(QUESTIONS, count // 2)
    people = names_of_people(generator, count)
    values = haystack.numbers(generator, 2 * count)
    firms = [f"Firm {n}" for n in generator.sample(range(1000, 10_000), count)]
    texts = [
        f"{people[i]} works for {firms[i]}. The badge number of {people[i]} is {values[i]}."
        for i in range(count)
    ]
    texts += [
        f"{firms[i]} is a company. The licence number of {firms[i]} is {values[count + i]}."
        for i in range(count)
    ]
    questions = []
    for i in range(QUESTIONS):
        what, answer = f"badge number of {people[i]}", values[i]
        if i % 2:
            what = f"licence number of the company that {people[i]} works for"
            answer = values[count + i]
        text = f"\nQuestion: What is the {what}? Answer with the number."
        questions.append(Question(text, f" The {what} is", answer))
    needed = set(range(QUESTIONS)) | {count + i for i in range(QUESTIONS)}
    order = list(range(2 * count))
    generator.shuffle(order)
    lines = [f"Document [{n}] {texts[i]}" for n, i in enumerate(order, 1)]
    return Facts(lines, questions, frozenset(n for n, i in enumerate(order) if i in needed))


NUMBER_TASKS = (
    shared_context_task(  # RULER's niah_multikey_1 with eight keys
        "niah_eight_keys",
        "Needle, eight keys",
        "Eight numbers of seven digits are hidden in text under different keys; each key is asked "
        "for in a request of its own.",
        opening="Some special magic numbers are hidden within the following text. Make sure to "
        "memorize them. I will quiz you about the numbers afterwards.\n",
        facts=_eight_keys,
    ),
    shared_context_task(  # RULER's niah_multikey_3 with numbers
        "records",
        "One of many records",
        "The context is a list of records, a number of six digits and one of seven each; the "
        "second is asked for, given the first.",
        opening="Here is a list of records.\n\n",
        facts=_records,
        in_text=False,
    ),
    shared_context_task(  # RULER's vt the other way round
        "variable_value",
        "Value of a variable",
        "Eight numbers are assigned to variables in text, and each is passed on to two more; the "
        "value of the last variable of each chain is asked for.",
        opening="Memorize and track the chain(s) of variable assignment hidden in the following "
        "text.\n\n",
        facts=_variable_value,
    ),
    shared_context_task(
        "multi_document_numbers",
        "Multi-document QA, numbers",
        "Generated notes on people and firms, numbered; every other question asks for a number in "
        "one of them, the rest for one that two make together.",
        opening="Read the following documents and answer the question after them.\n\n",
        facts=_document_numbers,
        in_text=False,
        source="after arXiv:2307.03172 and arXiv:1809.09600; generated facts",
    ),
)
