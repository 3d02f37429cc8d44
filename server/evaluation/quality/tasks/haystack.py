# SPDX-License-Identifier: Apache-2.0
"""Padding, keys and needles that the retrieval tasks share, after RULER (arXiv:2404.06654).

RULER's haystacks are essays that it downloads, and its keys are an adjective and a noun from
the package wonderwords. Deviation: here the essays are the corpus, and the words a list below.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Sequence

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.corpus import Corpus

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's repeated sentence."""

DEPTHS = tuple(i / 39 for i in range(40))
"""RULER inserts needles at 40 evenly spaced depths between beginning and end."""

_LONGEST_WORDS = 30
ENDS = (".", "!", "?", "。", "！", "？")
"""Of sentences; no space follows the last three, of Chinese and Japanese."""
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])\s*")
_ADJECTIVES = (
    "ancient bitter brave bright calm clever cold curious dusty eager early faint fierce fresh "
    "gentle golden grand hollow humble icy jolly keen lazy little lively loud mellow mild misty "
    "narrow noble odd pale patient plain polite proud quick quiet rapid rare rough rusty sharp "
    "shiny silent slow smooth soft sour steep sturdy sweet swift tall tender tidy vivid warm wise"
)
_NOUNS = (
    "anchor apple barrel basket beacon bridge button candle canyon carpet castle cellar circle "
    "cloud copper corner cradle desert dragon engine falcon feather forest garden glacier hammer "
    "harbor helmet island jacket kettle ladder lantern lemon marble meadow mirror mountain needle "
    "orchard paddle pebble pencil planet pocket rabbit ribbon river saddle shadow signal spider "
    "temple thunder timber tunnel valley velvet violin window winter"
)


def keys(generator: random.Random, count: int) -> list[str]:
    """Return `count` different keys, each an adjective and a noun joined by a hyphen."""
    adjectives, nouns = _ADJECTIVES.split(), _NOUNS.split()
    found: dict[str, None] = {}
    while len(found) < count:
        found[f"{generator.choice(adjectives)}-{generator.choice(nouns)}"] = None
    return list(found)


def numbers(generator: random.Random, count: int) -> list[str]:
    """Return `count` different numbers of seven digits, RULER's values."""
    return [str(n) for n in generator.sample(range(1_000_000, 10_000_000), count)]


def needle(key: str, value: str) -> str:
    """Return RULER's sentence that hides `value` under `key`."""
    return f"One of the special magic numbers for {key} is: {value}."


def sentences(corpus: Corpus, generator: random.Random) -> list[str]:
    """Return the corpus from a random text and sentence on, white space collapsed.

    Raises `SettingsError` if there is no sentence in it.
    """
    texts = list(corpus.texts.values())
    first = generator.randrange(len(texts))
    found = [s for text in texts[first:] + texts[:first] for s in _split(text)]
    if not found:
        raise SettingsError("corpus: no sentence in it; give longer texts with --corpus")
    start = generator.randrange(max(1, len(_split(texts[first])) // 2))
    return found[start:] + found[:start]


def take(padding: Sequence[str], count: int) -> list[str]:
    """Return `count` pieces of padding; it begins anew when it runs out."""
    return list(itertools.islice(itertools.cycle(padding), count))


def insert(pieces: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """Return the pieces with each needle before the piece at its depth; equal depths keep order."""
    at = (round(depth * len(pieces)) for depth in depths)
    places = sorted(zip(at, needles, strict=True), key=lambda item: item[0])
    found: list[str] = []
    last = 0
    for place, text in places:
        found += [*pieces[last:place], text]
        last = place
    return [*found, *pieces[last:]]


@functools.lru_cache(maxsize=64)
def _split(text: str) -> list[str]:
    """Sentences; long ones, such as source code, in pieces of `_LONGEST_WORDS`."""
    found = []
    for sentence in _SENTENCE_END.split(text.strip()):
        words = sentence.split()
        found += [
            " ".join(words[i : i + _LONGEST_WORDS]) for i in range(0, len(words), _LONGEST_WORDS)
        ]
    return found
