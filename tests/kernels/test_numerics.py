# SPDX-License-Identifier: Apache-2.0
"""Some of the random shapes of item *numerics* of ``make acceptance``, and that it finds errors."""

from __future__ import annotations

from collections.abc import Iterator

import numerics_draw
import pytest
import torch
from numerics_draw import Compared, Draw, measure
from numerics_operations import OPERATIONS
from tolerances import TOLERANCES


# `tests/policies/test_lfps.py` has the one that Numba compiles, for half a minute a process.
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "lfps_heads"])
def test_random_shapes_equal_float64(name: str) -> None:
    found = measure(name, OPERATIONS[name], 4)
    assert found["failures"] == []
    assert found["shapes"] == 4
    assert 0 <= found["largest_error"] <= 1


def squares(draw: Draw) -> Iterator[Compared]:
    x = torch.randn(draw.number("size", 1, 9)) + 2
    yield Compared("square", x * x, x.double() ** 2, TOLERANCES[torch.float32])


def test_the_same_shapes_are_drawn_again() -> None:
    one, two = measure("squares", squares, 5), measure("squares", squares, 5)
    assert one | {"seconds": 0} == two | {"seconds": 0}
    assert 0 < one["largest_error"] < 1


def test_a_wrong_result_is_found_with_what_was_drawn() -> None:
    def wrong(draw: Draw) -> Iterator[Compared]:
        for each in squares(draw):
            is_long = len(each.actual) > 3
            yield each._replace(actual=each.actual * 1.001) if is_long else each

    found = measure("wrong", wrong, 9)
    assert found["num_failures"] >= 6
    assert found["largest_error"] > 10
    assert all(failure["drawn"]["size"] > 3 for failure in found["failures"])


def test_what_raises_or_compares_nothing_is_a_failure() -> None:
    def raises(draw: Draw) -> Iterator[Compared]:
        yield from squares(draw)
        raise ValueError("no such shape")

    def empty(draw: Draw) -> Iterator[Compared]:
        draw.number("size", 1, 9)
        yield from ()

    for operation, message in ((raises, "ValueError: no such shape"), (empty, "nothing was")):
        found = measure("broken", operation, 1)
        assert found["largest_error"] == numerics_draw.INFINITE
        assert message in str(found["failures"][0]["errors"])


def test_too_few_shapes_are_an_error() -> None:
    def one(draw: Draw) -> Iterator[Compared]:
        draw.option("size", (1,))
        yield from squares(Draw("0"))

    with pytest.raises(RuntimeError, match="1 shapes where 3"):
        measure("one", one, 3)
