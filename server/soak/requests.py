# SPDX-License-Identifier: Apache-2.0
"""The mixed load: which requests there are, drawn from a seed.

Each prompt holds a code of nine digits of its own, twice, and ends where a third would follow: a
small model repeats its code, and somebody else's code in an answer shows that K/V were mixed up.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
Kind = Literal[
    "short", "long", "stream", "chat", "several", "logprobs", "hang up", "bad", "canary", "probe"
]
_WEIGHTS: dict[Kind, int] = {
    "short": 4, "long": 3, "stream": 4, "chat": 3, "several": 2, "logprobs": 2, "hang up": 4,
    "bad": 3, "canary": 4,
}  # fmt: skip
_SUBJECTS = ("The harbour", "A teacher", "My neighbour", "The old clock", "One engineer")
_VERBS = ("follows", "repairs", "measures", "remembers", "describes", "carries", "forgets")
_OBJECTS = ("a small boat", "the long letter", "two red lamps", "the road", "a glass of tea")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request."""

    kind: Kind
    """Row of the report that counts it."""
    path: str
    body: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes | None = None
    """Sent in place of `body`."""
    code: str = ""
    """What its prompt holds and no other prompt does; empty if it holds none."""
    hang_up_after: int | None = None
    """Close the connection after so many events of the stream."""
    refusals: frozenset[int] = frozenset()
    """Statuses that it has to be refused with; empty: it has to be answered."""
    canary: int | None = None
    """Number of the prompt whose solo answer it has to repeat."""


def prose(rng: random.Random, sentences: int) -> str:
    """Return sentences of about eight tokens each."""
    return " ".join(
        f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)}."
        for _ in range(sentences)
    )


def code_of(seed: int, number: int) -> str:
    """Return the nine digits of request `number`."""
    return f"{random.Random(f'code/{seed}/{number}').randrange(10**9):09d}"


class Load:
    """Draws requests; request `number` of a seed is always the same.

    There are `canaries` canary prompts; the longest prompts have about `longest_tokens`.
    """

    def __init__(self, seed: int, *, canaries: int, longest_tokens: int) -> None:
        self._seed, self._canaries = seed, canaries
        self._most_sentences = max(8, longest_tokens // 8)
        self._kinds = list(_WEIGHTS)

    def draw(self, number: int) -> Request:
        """Return request `number`."""
        rng = random.Random(f"load/{self._seed}/{number}")
        kind = rng.choices(self._kinds, list(_WEIGHTS.values()))[0]
        if kind == "bad":
            return rng.choice(BAD_REQUESTS)
        if kind == "canary":
            return self.canary(rng.randrange(self._canaries), stream=rng.random() < 0.5)
        code = code_of(self._seed, number)
        sentences = rng.randrange(4)
        if kind == "long" or (kind == "hang up" and rng.random() < 0.3):
            sentences = rng.randrange(self._most_sentences // 4, self._most_sentences)
        body: dict[str, Any] = {"prompt": _prompt(prose(rng, sentences), code)}
        body["max_tokens"] = rng.randrange(8, 24)
        body["temperature"] = rng.choice([0, 0, 0.8])
        path, hang_up_after = COMPLETIONS, None
        if kind == "chat":
            path = CHAT
            body["messages"] = [{"role": "user", "content": f"Repeat this code: {code}"}]
            del body["prompt"]
            body["stream"] = rng.random() < 0.5
        elif kind == "several":
            body |= {"n": rng.randrange(2, 5), "temperature": 0.8, "stream": rng.random() < 0.5}
        elif kind == "logprobs":
            body |= {"logprobs": rng.randrange(1, 6), "stream": rng.random() < 0.5}
        elif kind == "hang up":
            body |= {"stream": True, "max_tokens": 64}
            hang_up_after = rng.randrange(8)
        else:
            body["stream"] = kind == "stream" or rng.random() < 0.3
        return Request(kind=kind, path=path, body=body, code=code, hang_up_after=hang_up_after)

    def canary(self, index: int, *, stream: bool = False, logprobs: bool = False) -> Request:
        """Return canary `index`: greedy, always with the same prompt.

        Every third one is long. It starts from an empty prefix cache (`cache_salt`), because a
        cached prefix has fewer queries to fill its resident set with.
        """
        rng = random.Random(f"canary/{self._seed}/{index}")
        code = code_of(self._seed, -1 - index)
        is_long = index % 3 == 2
        sentences = self._most_sentences // 3 if is_long else rng.randrange(3)
        body = _greedy(prose(rng, sentences), code, max_tokens=16, stream=stream)
        if is_long:
            body["cache_salt"] = f"{random.getrandbits(64):x}"
        if logprobs:
            body["logprobs"] = 2
        return Request(kind="canary", path=COMPLETIONS, body=body, code=code, canary=index)

    def probe(self, number: int) -> Request:
        """Return a request that is always of the same length, to compare times with."""
        code = code_of(self._seed, -1_000_000 - number)
        body = _greedy("", code, max_tokens=8, stream=True)
        return Request(kind="probe", path=COMPLETIONS, body=body, code=code)


def _prompt(before: str, code: str) -> str:
    return f"{before} Code {code}. Code {code}. Code".lstrip()


def _greedy(before: str, code: str, **more: Any) -> dict[str, Any]:
    return {"prompt": _prompt(before, code), "temperature": 0, "ignore_eos": True, **more}


def _bad(path: str, refusals: set[int], raw: bytes | None = None, **body: Any) -> Request:
    return Request(kind="bad", path=path, body=body, raw=raw, refusals=frozenset(refusals))


_MESSAGES = [{"role": "user", "content": "hi"}]
BAD_REQUESTS: tuple[Request, ...] = (
    _bad(CHAT, {400}, messages=_MESSAGES, logprobs=True, top_logprobs=100_000),
    _bad(COMPLETIONS, {400}, prompt=[-1, 5]),
    _bad(COMPLETIONS, {400}, prompt=[10**9]),
    _bad(GENERATE, {400}, input_ids=[-1, 5]),
    _bad(COMPLETIONS, {400}, prompt="hi", n=20_000),
    _bad(COMPLETIONS, {400}, prompt="hi", temperature=-1),
    _bad(COMPLETIONS, {400}, prompt="hi", stop=["x"] * 10_000),
    _bad(COMPLETIONS, {400}, prompt="hi", max_tokens=0),
    _bad(COMPLETIONS, {400}, prompt=""),
    _bad(COMPLETIONS, {400}, prompt="hi", nothing=1),
    _bad(COMPLETIONS, {404}, prompt="hi", model="other"),
    _bad(CHAT, {400}, messages=[]),
    _bad(COMPLETIONS, {400}, raw=b"{"),
    _bad(COMPLETIONS, {400}, raw=b"[" * 100_000),
    _bad(COMPLETIONS, {400, 413}, raw=b'{"prompt": "' + b"word " * 2_000_000 + b'"}'),
    _bad("/update_weights_from_disk", {404}, model_path="/"),
    _bad("/flush_cache_of_others", {404}),
    _bad("/pause_generation", {401, 403}),
)
"""What has to be refused at once, whatever else goes on."""
