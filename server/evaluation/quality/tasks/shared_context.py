# SPDX-License-Identifier: Apache-2.0
"""Tasks that ask several questions on one long context, with numbers as answers.

The server prefills such a context once and finds it in its prefix cache for the next question.
Texts are joined as token ids, so that a context of 32K tokens is made in milliseconds.
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
