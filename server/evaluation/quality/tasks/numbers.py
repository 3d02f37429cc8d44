# SPDX-License-Identifier: Apache-2.0
"""Retrieval tasks whose answers are numbers: keys in text, records, variables, documents.

Small models misspell words that they have found; a number is right or wrong.

Several questions are asked on one long context. The server prefills it once and finds it in its
prefix cache for the next question. Texts are joined as token ids, so that a context of 32K tokens
is made in milliseconds.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.tokenizing import Prompt, Tokenizer

from . import haystack
from .base import Task, TaskInputs, question_sample
from .multi_document_qa import names_of_people

_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
QUESTIONS = 8
"""Asked on each context."""
_PAGE, _REST = 128, 96
"""Shared contexts have 96 tokens modulo SGLang's page.

Whole pages are found in the prefix cache, so at least 96 tokens are prefilled for every question:
more than the 64 prompt queries that seed a resident set, as without the cache.
"""


class Question(NamedTuple):
    """What is asked on a context: the question, how the answer begins, and the number."""

    text: str
    prefix: str
    answer: str


class Facts(NamedTuple):
    """What a context holds.

    `lines` are put in in order: at even distances in text, or one after another where there is no
    text. `questions` are `QUESTIONS` many. `needed` are the lines without which there is no
    answer, where not all of them fit.
    """

    lines: Sequence[str]
    questions: Sequence[Question]
    needed: frozenset[int] = frozenset()


def shared_context_task(
    name: str,
    title: str,
    definition: str,
    *,
    opening: str,
    facts: Callable[[Random, int], Facts],
    in_text: bool = True,
    source: str = "after RULER, arXiv:2404.06654; contexts are shared by questions",
) -> Task:
    """Return a task of facts in real text, or in lines alone; questions share a context.

    `opening` stands before the context. Where the lines are not `in_text` they are the context, as
    many as fit; `facts` is asked for about so many.
    """

    def of_context(inputs: TaskInputs, group: int) -> list[Sample]:
        generator = inputs.generator(name, group)
        num_facts = QUESTIONS if in_text else _num_lines(inputs, facts)
        found = facts(generator, num_facts)
        build = inputs.prompts.build
        asked = [build("", each.text, each.prefix).question_ids for each in found.questions]
        before = build(opening).context_ids
        room = _shared_length(inputs.context_tokens - max(map(len, asked)), name) - len(before)
        body = _Body(inputs, generator, room, name)
        context = before + (body.with_facts(found.lines) if in_text else body.of_lines(found))
        return [
            question_sample(
                inputs, group * QUESTIONS + i, Prompt(context, ids), [question.answer],
                num_new_tokens=16, context=group,
            )
            for i, (question, ids) in enumerate(zip(found.questions, asked, strict=True))
        ]  # fmt: skip

    def samples(inputs: TaskInputs) -> list[Sample]:
        groups = range(-(-inputs.num_samples // QUESTIONS))
        found = itertools.chain.from_iterable(of_context(inputs, group) for group in groups)
        return list(found)[: inputs.num_samples]

    return Task(name=name, title=title, definition=definition, source=source, samples=samples)


def _num_lines(inputs: TaskInputs, facts: Callable[[Random, int], Facts]) -> int:
    """Return about how many lines fit."""
    few = facts(Random(0), 2 * QUESTIONS)
    encode = inputs.prompts.tokenizer.encode
    used = sum(len(encode(f"{line}\n", add_special_tokens=False)) for line in few.lines)
    return max(2 * QUESTIONS, inputs.context_tokens * len(few.lines) // used)


def _shared_length(room: int, name: str) -> int:
    """Return the longest length of a shared context of at most `room` tokens."""
    length = (room - _REST) // _PAGE * _PAGE + _REST
    if length < _REST + _PAGE:
        raise SettingsError(
            f"{name}: {room} tokens are left for the context, {_REST + _PAGE} are needed; raise "
            "--context-tokens"
        )
    return length


class _Body:
    """Makes the tokens of one context, exactly `length` of them."""

    def __init__(self, inputs: TaskInputs, generator: Random, length: int, name: str) -> None:
        self._tokenizer, self._generator = inputs.prompts.tokenizer, generator
        self._texts = list(inputs.corpus.texts.values())
        self._length, self._name = length, name

    def with_facts(self, lines: Sequence[str]) -> list[int]:
        """Spread `lines` over real text, each after the end of a line or sentence."""
        facts = [self._encode(f"\n\n{line}\n\n") for line in lines]
        room = self._length - sum(map(len, facts))
        if room < len(facts):
            self._refuse(self._length - room)
        text = self._text(room)
        ends = [i + 1 for i, token in enumerate(text) if _is_end(self._tokenizer, token)]
        ends = ends or list(range(room))  # of a language without such ends, any place
        found: list[int] = []
        last = 0
        for i, fact in enumerate(facts):
            # Anywhere within its share of the context: depths are even, and not the same.
            wanted = int((i + self._generator.random()) / len(facts) * room)
            at = bisect.bisect_left(ends, wanted)
            place = max(last, ends[at] if at < len(ends) else room)
            found += [*text[last:place], *fact]
            last = place
        return found + text[last:]

    def of_lines(self, facts: Facts) -> list[int]:
        """Put the lines one after another; what is left is filled with real text before them."""
        lines = [self._encode(f"{line}\n") for line in facts.lines]
        needed = sum(len(lines[i]) for i in facts.needed)
        if needed > self._length:
            self._refuse(needed)
        kept, size = set(facts.needed), needed
        for i, line in enumerate(lines):
            if i not in kept and size + len(line) <= self._length:
                kept.add(i)
                size += len(line)
        return self._text(self._length - size) + [x for i in sorted(kept) for x in lines[i]]

    def _text(self, length: int) -> list[int]:
        """Return `length` tokens of the corpus, from a random place on."""
        if not length:
            return []
        ids = _encoded(self._tokenizer, self._generator.choice(self._texts))
        if not ids:
            raise SettingsError("corpus: no text in it; give longer texts with --corpus")
        start = self._generator.randrange(max(1, len(ids) - length))
        found = ids[start : start + length]  # a short text begins anew
        return list(itertools.islice(itertools.chain(found, itertools.cycle(ids)), length))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _refuse(self, needed: int) -> None:
        raise SettingsError(
            f"{self._name}: needs {needed} tokens for its facts, {self._length} are left; raise "
            "--context-tokens"
        )


@functools.lru_cache(maxsize=64)
def _encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@functools.lru_cache(maxsize=1 << 18)
def _is_end(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token ends a line or a sentence."""
    return tokenizer.decode([token]).endswith(("\n", *haystack.ENDS))


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
