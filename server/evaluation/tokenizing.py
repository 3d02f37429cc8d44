# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, and the two ways of putting a prompt together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from tandemkv.cache_rank.protocol.errors import SettingsError

PromptStyle = Literal["raw", "chat"]
_SEPARATOR = "@@question@@"  # no white space at its ends: many templates strip that


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    def __hash__(self) -> int:
        """Return what tells one tokenizer from another, for caches of tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
        """Return a conversation as text."""


class Prompt(NamedTuple):
    """A prompt in two parts."""

    context_ids: list[int]
    question_ids: list[int]

    def __len__(self) -> int:
        """Tokens of both parts."""
        return len(self.context_ids) + len(self.question_ids)


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Return the tokenizer of a model directory; nothing is downloaded.

    Raises `SettingsError` if the directory has none.
    """
    import transformers

    transformers.logging.set_verbosity_error()  # of texts longer than the context, too
    try:
        found: Tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(model_dir), local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise SettingsError(f"model={model_dir}: no tokenizer there ({error})") from error
    return found


def end_tokens(model_dir: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end an answer: the tokenizer's, and all those of the model's two files.

    A model may have several, of texts and of turns, of which its tokenizer knows one.
    """
    found: set[Any] = {getattr(tokenizer, "eos_token_id", None)}
    for path in (model_dir / "config.json", model_dir / "generation_config.json"):
        if path.is_file():
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [ids])
    return frozenset(found - {None})


class PromptBuilder:
    """Joins context, question and the beginning of the answer.

    ``raw`` is a plain completion, for base models and small ones. ``chat`` puts context and
    question into one user turn of the model's chat template, and the beginning of the answer
    into the assistant's, as RULER and kvpress do.
    """

    def __init__(self, tokenizer: Tokenizer, style: PromptStyle) -> None:
        self.tokenizer = tokenizer
        self._before, self._after = "", ""
        self._adds_special = style == "raw"
        if style == "chat":
            try:
                text = tokenizer.apply_chat_template(
                    [{"role": "user", "content": _SEPARATOR}],
                    tokenize=False,
                    add_generation_prompt=True,
                )
            except ValueError as error:
                raise SettingsError(
                    "prompt style chat: the tokenizer has no chat template; use --prompt-style raw"
                ) from error
            self._before, found, self._after = str(text).partition(_SEPARATOR)
            if not found:
                raise SettingsError(
                    "prompt style chat: the tokenizer's chat template leaves out or changes what a "
                    "user says; use --prompt-style raw"
                )

    def build(self, context: str, question: str = "", answer_prefix: str = "") -> Prompt:
        """Return the ids. The parts are tokenised singly, so that either can be had alone."""
        context_ids = self.tokenizer.encode(
            self._before + context, add_special_tokens=self._adds_special
        )
        rest = question + self._after + answer_prefix
        question_ids = self.tokenizer.encode(rest, add_special_tokens=False) if rest else []
        return Prompt(list(context_ids), list(question_ids))
