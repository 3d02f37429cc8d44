# SPDX-License-Identifier: Apache-2.0
"""Random sizes, types and options of an operation, and how far its results may be off."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from tolerances import TOLERANCES, Tolerance, error_ratio

SEED = 26
FLOAT32 = TOLERANCES[torch.float32]
FLOATS = ("float32", "bfloat16", "float16")
KV_FLOATS = (*FLOATS, "float8_e4m3fn")
INTS = ("int32", "int64")
# Triton's interpreter multiplies bfloat16 as if its bits were integers.
MULTIPLIED = ("float32", "float16")
INFINITE = 1e9
"""Written for an error where none is allowed: JSON has no infinity."""

_T = TypeVar("_T")


class Compared(NamedTuple):
    """A result, what it is in float64, and what may differ."""

    what: str
    actual: torch.Tensor
    expected: torch.Tensor
    tolerance: Tolerance


class Draw:
    """What is random in one case. Sizes and options are kept under their names.

    Parameters
    ----------
    seed : str
        The same seed draws the same, contents of tensors included.
    is_interpreted : bool
        Whether Triton's interpreter runs the case: some thousand times as slow, with fewer types.
    """

    def __init__(self, seed: str, *, is_interpreted: bool = False) -> None:
        self.random = random.Random(seed)
        self.is_interpreted = is_interpreted
        self.drawn: dict[str, Any] = {}
        torch.manual_seed(self.random.getrandbits(62))

    def number(self, name: str, low: int, high: int, interpreted: int | None = None) -> int:
        """Draw from ``[low, high]``, each order of magnitude as often; `interpreted` caps it."""
        if self.is_interpreted and interpreted is not None:
            high = max(low, min(high, interpreted))
        value = low + int(math.exp(self.random.uniform(0, math.log(high - low + 2)))) - 1
        self.drawn[name] = min(value, high)
        return min(value, high)

    def option(self, name: str, options: Sequence[_T]) -> _T:
        """Draw one of some options."""
        chosen = self.random.choice(options)
        self.drawn[name] = chosen
        return chosen

    def flag(self, name: str) -> bool:
        """Draw yes or no."""
        return self.option(name, (False, True))

    def dtype(self, name: str, options: Sequence[str]) -> torch.dtype:
        """Draw a type of elements by its name."""
        found: torch.dtype = getattr(torch, self.option(name, options))
        return found

    def heads(self) -> tuple[int, int, int]:
        """Draw KV heads, query heads of each, and an even head dimension."""
        heads, group = self.number("heads", 1, 4, 2), self.number("group", 1, 8, 4)
        return heads, group, 2 * self.number("half_dim", 1, 64, 32)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Contents: int64 from ``[low, high]``, of which both ends are as likely as the rest."""
        values = torch.randint(low, high + 1, shape)
        ends = torch.tensor([low, high])[torch.randint(0, 2, shape)]
        return torch.where(torch.rand(shape) < 0.25, ends, values)


Operation = Callable[[Draw], Iterator[Compared]]


def measure(
    name: str, operation: Operation, number: int, *, is_interpreted: bool = False
) -> dict[str, Any]:
    """Compare `number` different shapes; say the largest error as a part of the tolerance.

    Raises
    ------
    RuntimeError
        If there are not so many.
    """
    shapes: set[str] = set()
    largest, failures, begun = 0.0, [], time.perf_counter()
    for index in range(20 * number):
        draw = Draw(f"{SEED}/{name}/{index}", is_interpreted=is_interpreted)
        errors = _errors(operation, draw)
        shapes.add(json.dumps(draw.drawn))
        ratio = max(errors.values())
        largest = max(largest, ratio)
        if ratio > 1:
            wrong = {what: min(error, INFINITE) for what, error in errors.items() if error > 1}
            failures.append({"case": index, "drawn": draw.drawn, "errors": wrong})
        if len(shapes) == number:
            break
    else:
        raise RuntimeError(f"{name}: {len(shapes)} shapes where {number} are to be drawn")
    return {
        "shapes": number,
        "largest_error": float(f"{min(largest, INFINITE):.3g}"),
        "num_failures": len(failures),
        "failures": failures[:5],
        "seconds": round(time.perf_counter() - begun, 1),
    }


def _errors(operation: Operation, draw: Draw) -> dict[str, float]:
    """Return each result's error; what cannot be compared is one without bounds."""
    errors: dict[str, float] = {}
    try:
        for each in operation(draw):
            ratio = error_ratio(each.actual, each.expected, each.tolerance)
            errors[each.what] = max(ratio, errors.get(each.what, 0.0))
    except Exception as error:
        errors[f"{type(error).__name__}: {error}"[:300]] = math.inf
    return errors or {"nothing was compared": math.inf}
