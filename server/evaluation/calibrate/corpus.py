# SPDX-License-Identifier: Apache-2.0
"""Texts to calibrate on, all of one length."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tandemkv.cache_rank.calibration.format import CalibrationError
from tandemkv.server.evaluation.corpus import language_reference, read_text
from tandemkv.server.evaluation.tokenizing import Tokenizer


class Texts(NamedTuple):
    """Token ids of each text, and names of where they are from."""

    tokens: list[list[int]]
    sources: tuple[str, ...]


def cut_texts(
    files: Sequence[Path], tokenizer: Tokenizer, *, num_texts: int, num_tokens: int
) -> Texts:
    """Cut texts of `num_tokens` tokens from `files`, or from Python's reference without any.

    Texts are taken evenly over the whole corpus, the same ones each time. Raises `SettingsError` if
    a file cannot be read as UTF-8, or there is no text of that length.
    """
    corpus = {path.name: read_text(path) for path in files}
    if not files:
        name = f"pydoc_data.topics of Python {platform.python_version()} (PSF-2.0)"
        corpus = {name: language_reference()}
    pieces: list[list[int]] = []
    for text in corpus.values():
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces += [ids[i : i + num_tokens] for i in range(0, len(ids), num_tokens)]
    whole = [piece for piece in pieces if len(piece) == num_tokens]
    if not whole:
        longest = max((len(piece) for piece in pieces), default=0)
        raise CalibrationError(
            f"text={', '.join(corpus)}: no text of {num_tokens} tokens (the longest has "
            f"{longest}); give longer files as --text, or fewer --tokens"
        )
    num_texts = min(num_texts, len(whole))
    taken = [whole[i * len(whole) // num_texts] for i in range(num_texts)]
    return Texts(taken, tuple(corpus))
