# SPDX-License-Identifier: Apache-2.0
"""What each canary prompt is answered alone, and whether it is answered the same under load.

Sums of floating-point numbers depend on the batch, so a token whose two best candidates are nearly
equal may differ: only what comes before the first such token is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tandemkv.cache_rank.protocol.errors import TandemKVError

from .client import Client, Outcome
from .requests import Load

LEAST_MARGIN = 0.1
"""In nats, between the two best candidates of a token that has to be repeated."""


class SoakError(TandemKVError):
    """The soak cannot be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solo:
    """What a canary is answered alone."""

    text: str
    """The part that has to be repeated."""
    num_tokens: int
    is_dense: bool
    """Whether the request attends to everything. What a sparse one selects may change with
    near-equal scores, so that its answers are counted and not judged."""


def record_solo(
    client: Client, load: Load, number: int, is_dense: Callable[[int], bool]
) -> list[Solo]:
    """Ask for each canary alone.

    Raises `SoakError` if one is not answered.
    """
    found = []
    for index in range(number):
        outcome = client.send(load.canary(index, logprobs=True))
        if outcome.status != 200 or outcome.ending != "complete":
            raise SoakError(
                f"canary {index} is not answered before the load begins: {outcome.ending}, HTTP "
                f"{outcome.status}: {outcome.text[:200]}"
            )
        tokens = _certain(outcome.body["choices"][0]["logprobs"])
        is_all = is_dense(int(outcome.body["usage"]["total_tokens"]))
        found.append(Solo(text="".join(tokens), num_tokens=len(tokens), is_dense=is_all))
    return found


def _certain(logprobs: dict[str, Any]) -> list[str]:
    """Return the tokens before the first that is nearly another one."""
    tokens: list[str] = []
    for token, best in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        values = sorted(best.values(), reverse=True)
        if len(values) > 1 and values[0] - values[1] < LEAST_MARGIN:
            break
        tokens.append(token)
    return tokens


@dataclass(slots=True, kw_only=True)
class Agreement:
    """How many canaries were answered, and how many of the answers differ."""

    answered: int = 0
    differ: int = 0


def compare(outcomes: Iterable[Outcome], solos: list[Solo]) -> dict[str, Agreement]:
    """Return the agreement of canaries that attend to everything (``dense``), and of the others."""
    found = {"dense": Agreement(), "sparse": Agreement()}
    for outcome in outcomes:
        index = outcome.request.canary
        if index is None or outcome.ending != "complete" or outcome.status != 200:
            continue
        solo = solos[index]
        each = found["dense" if solo.is_dense else "sparse"]
        each.answered += 1
        each.differ += not outcome.text.startswith(solo.text)
    return found
