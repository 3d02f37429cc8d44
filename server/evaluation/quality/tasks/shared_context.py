# SPDX-License-Identifier: Apache-2.0
"""Tasks that ask several questions on one long context, with numbers as answers.

The server prefills such a context once and finds it in its prefix cache for the next question.
Texts are joined as token ids, so that a context of 32K tokens is made in milliseconds.
"""

from __future__ import annotations

import bisect
import functools
from abc import abstractmethod
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.quality.samples import Sample
from tandemkv.server.evaluation.tokenizing import Prompt, Tokenizer

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


class SharedContextTask(Task):
    """Facts in real text, or in lines alone; `QUESTIONS` questions share a context."""

    opening: str
    """Stands before the context."""
    in_text: bool = True
    """Whether the lines are spread over real text. Else they are the context, as many as fit."""
    source = "after RULER, arXiv:2404.06654; contexts are shared by questions"
    num_new_tokens = 16

    @abstractmethod
    def facts(self, generator: Random, count: int) -> Facts:
        """Return facts; if `in_text` is false, about `count` lines."""

    def samples(self, inputs: TaskInputs) -> list[Sample]:
        """See `Task.samples`."""
        found: list[Sample] = []
        for group in range(-(-inputs.num_samples // QUESTIONS)):
            found += self._of_context(inputs, group)
        return found[: inputs.num_samples]

    def _of_context(self, inputs: TaskInputs, group: int) -> list[Sample]:
        generator = inputs.generator(self.name, group)
        facts = self.facts(generator, self._num_facts(inputs))
        asked = [
            inputs.prompts.build("", question.text, question.prefix).question_ids
            for question in facts.questions
        ]
        room = _shared_length(inputs.context_tokens - max(map(len, asked)), self.name)
        opening = inputs.prompts.build(self.opening).context_ids
        body = _Body(inputs, generator, room - len(opening), self.name)
        middle = body.with_facts(facts.lines) if self.in_text else body.of_lines(facts)
        return [
            question_sample(
                group * QUESTIONS + i,
                Prompt(opening + middle, ids),
                num_new_tokens=inputs.new_tokens(self.num_new_tokens),
                answers=[question.answer],
                scorer="string_match_all",
                notes={"context": group, "tokens": len(opening) + len(middle) + len(ids)},
            )
            for i, (question, ids) in enumerate(zip(facts.questions, asked, strict=True))
        ]

    def _num_facts(self, inputs: TaskInputs) -> int:
        """Return about how many lines fit, where they are all that a context has."""
        if self.in_text:
            return QUESTIONS
        few = self.facts(Random(0), 2 * QUESTIONS)
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
        self._prompts, self._generator = inputs.prompts, generator
        self._texts = list(inputs.corpus.texts.values())
        self._length, self._name = length, name

    def with_facts(self, lines: Sequence[str]) -> list[int]:
        """Spread `lines` over real text, each after the end of a line or sentence."""
        facts = [self._encode(f"\n\n{line}\n\n") for line in lines]
        room = self._length - sum(map(len, facts))
        if room < len(facts):
            self._refuse(self._length - room)
        text = self._text(room)
        ends = _ends(self._prompts.tokenizer, text)
        found: list[int] = []
        last = 0
        for i, fact in enumerate(facts):
            # Anywhere within its share of the context: depths are even, and not the same.
            wanted = int((i + self._generator.random()) / len(facts) * room)
            place = max(last, _at_or_after(ends, wanted, room))
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
        body = [token for i in sorted(kept) for token in lines[i]]
        return self._text(self._length - len(body)) + body

    def _text(self, length: int) -> list[int]:
        """Return `length` tokens of the corpus, from a random place on."""
        if not length:
            return []
        ids = self._encoded(self._generator.choice(self._texts))
        if not ids:
            raise SettingsError("corpus: no text in it; give longer texts with --corpus")
        start = self._generator.randrange(max(1, len(ids) - length))
        found = list(ids[start : start + length])
        while len(found) < length:  # a short text begins anew
            found += ids[: length - len(found)]
        return found

    def _encode(self, text: str) -> list[int]:
        return list(self._prompts.tokenizer.encode(text, add_special_tokens=False))

    def _encoded(self, text: str) -> tuple[int, ...]:
        return _encoded(self._prompts.tokenizer, text)

    def _refuse(self, needed: int) -> None:
        raise SettingsError(
            f"{self._name}: needs {needed} tokens for its facts, {self._length} are left; raise "
            "--context-tokens"
        )


@functools.lru_cache(maxsize=64)
def _encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _ends(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return the places behind a token that ends a line or a sentence, ascending."""
    return [i + 1 for i, token in enumerate(ids) if _is_end(tokenizer, token)]


@functools.lru_cache(maxsize=1 << 18)
def _is_end(tokenizer: Tokenizer, token: int) -> bool:
    return tokenizer.decode([token]).endswith(("\n", ".", "!", "?"))


def _at_or_after(places: Sequence[int], wanted: int, otherwise: int) -> int:
    at = bisect.bisect_left(places, wanted)
    return places[at] if at < len(places) else otherwise
