# SPDX-License-Identifier: Apache-2.0
"""Text to calibrate on: files that are given, or Python's own reference, which is always there."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from tandemkv.cache_rank.calibration.format import CalibrationError


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        """Return token ids."""


class Texts(NamedTuple):
    """Token ids of each text, and names of where they are from."""

    tokens: list[list[int]]
    sources: tuple[str, ...]


def built_in_text() -> tuple[str, str]:
    """Return the text of ``pydoc_data.topics``, in the order of topics, and its name.

    It is the language reference that every CPython carries (about 110 000 tokens, PSF-2.0), so
    nothing has to be downloaded; the name tells the Python version that it is of.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return text, f"pydoc_data.topics of Python {platform.python_version()} (PSF-2.0)"


def read_corpus(
    files: Sequence[Path], tokenizer: Tokenizer, *, num_texts: int, num_tokens: int
) -> Texts:
    """Cut texts of `num_tokens` tokens from `files`, or from the built-in text if there are none.

    Texts are taken evenly over the whole corpus, the same ones each time.

    Raises
    ------
    CalibrationError
        If a file cannot be read as UTF-8, or there is no text of that length.
    """
    corpus = [built_in_text()] if not files else [(_read(path), path.name) for path in files]
    pieces: list[list[int]] = []
    for text, _ in corpus:
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        pieces += [ids[i : i + num_tokens] for i in range(0, len(ids), num_tokens)]
    whole = [piece for piece in pieces if len(piece) == num_tokens]
    if not whole:
        names = ", ".join(name for _, name in corpus)
        longest = max((len(piece) for piece in pieces), default=0)
        raise CalibrationError(
            f"text={names}: no text of {num_tokens} tokens (the longest has {longest}); give "
            "longer files as --text, or fewer --tokens"
        )
    num_texts = min(num_texts, len(whole))
    taken = [whole[i * len(whole) // num_texts] for i in range(num_texts)]
    return Texts(taken, tuple(name for _, name in corpus))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"text={path}: cannot be read as UTF-8 text ({error})") from error
