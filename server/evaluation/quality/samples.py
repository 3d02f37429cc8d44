# SPDX-License-Identifier: Apache-2.0
"""One question of a task, as token ids, and the file that holds all of them.

The files are what other systems read to be measured on the same prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tandemkv.cache_rank.protocol.errors import SettingsError


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question."""

    name: str
    """Unique within its task."""
    mode: Literal["generate", "follow_up", "force", "continue", "probe"]
    """``generate``: decode greedily and score the text. ``follow_up``: the same, in a second
    request that repeats the context of a first one. ``force``: decode `forced_ids` and take their
    log-likelihood. ``continue``: decode what dense continues with, and compare. ``probe``: as
    ``force``, with the attention measured."""
    context_ids: list[int]
    num_new_tokens: int
    """Tokens to decode after the prompt."""
    question_ids: list[int] = []
    """The prompt is the context followed by the question. A compression that does not see the
    question gets the context alone."""
    late_question: bool = False
    """The question is decoded token by token after the context, instead of prefilled with it."""
    forced_ids: list[int] = []
    """Tokens to decode, for ``force`` and ``probe``."""
    answers: list[str] = []
    scorer: str = ""
    """References, for a key of `tandemkv.server.evaluation.quality.scorers.SCORERS`."""
    notes: dict[str, str | int | float] = {}
    """What the report may want: depth, text, length."""

    @property
    def prompt_ids(self) -> list[int]:
        """What is prefilled."""
        return self.context_ids if self.late_question else self.context_ids + self.question_ids

    @property
    def num_tokens(self) -> int:
        """Length of the request at its end."""
        return len(self.context_ids) + len(self.question_ids) + self.num_new_tokens


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write one JSON line a sample; its folder is made. Raises `SettingsError` if it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.Encoder().encode_lines(samples))
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be written ({error.strerror}); name another folder with --out"
        ) from error


def read_samples(path: Path) -> list[Sample]:
    """Read what `write_samples` wrote.

    Raises `SettingsError` if the file is not there or not of this form.
    """
    try:
        return msgspec.json.Decoder(Sample).decode_lines(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror})") from error
    except msgspec.DecodeError as error:
        raise SettingsError(f"{path}: not a file of samples ({error})") from error


def digest(*parts: object) -> str:
    """Return a short hash of JSON-like values; results are kept under it."""
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:16]


def samples_digest(samples: Sequence[Sample]) -> str:
    """Return the digest of a task's samples."""
    return digest([msgspec.to_builtins(sample) for sample in samples])
