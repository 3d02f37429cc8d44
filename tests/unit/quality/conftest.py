# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of words, a corpus, and inputs of a task; no model is needed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tandemkv.server.quality.corpus import Corpus
from tandemkv.server.quality.tasks.base import TaskInputs
from tandemkv.server.quality.tokenizing import PromptBuilder


class WordTokenizer:
    """One token a word with the white space before it; long words are several tokens."""

    eos_token_id = 0

    def __init__(self) -> None:
        self._pieces = ["<eos>"]
        self._ids = {"<eos>": 0}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        found = []
        for piece in re.findall(r"\s*\S{1,6}|\s+", text):
            if piece not in self._ids:
                self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
            found.append(self._ids[piece])
        return found

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self._pieces[i] for i in ids if i or not skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        (message,) = messages
        return f"<user>{message['content']}</user><assistant>"


@pytest.fixture
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture
def corpus() -> Corpus:
    words = [f"word{i % 97} and thing{i % 31}." for i in range(1500)]
    return Corpus({"first": " ".join(words), "second": "\n".join(reversed(words))})


@pytest.fixture
def inputs(tokenizer: WordTokenizer, corpus: Corpus) -> TaskInputs:
    return TaskInputs(
        prompts=PromptBuilder(tokenizer, "raw"),
        corpus=corpus,
        context_tokens=700,
        num_samples=4,
        num_forced_tokens=40,
    )
