# SPDX-License-Identifier: Apache-2.0
"""Fewer combinations of parameters, and still every pair of them."""

from itertools import combinations, product
from typing import Any

from pairs import with_every_pair


class Callspec:
    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params


class Item:
    """What is looked at of a test of pytest's."""

    def __init__(self, **params: Any) -> None:
        if params:
            self.callspec = Callspec(params)


def pairs(items: list[Any]) -> set[Any]:
    return {pair for i in items for pair in combinations(sorted(i.callspec.params.items()), 2)}


def chosen(items: list[Any]) -> list[Any]:
    return with_every_pair(items)


def test_every_pair_is_left_of_a_product() -> None:
    items = [Item(a=a, b=b, c=c, d=d) for a, b, c, d in product(range(5), range(3), "xy", "pq")]
    found = chosen(items)
    assert pairs(found) == pairs(items)
    assert 15 <= len(found) <= 20
    assert len(found) == len(set(found))
    assert chosen(items) == found


def test_nothing_is_left_out_of_one_list_or_two() -> None:
    one = [Item(a=a) for a in range(7)]
    two = [Item(a=a, b=b) for a, b in product(range(4), range(3))]
    told_together = [Item(a=a, b=a * a) for a in range(7)]
    for items in (one, two, told_together):
        assert set(chosen(items)) == set(items)


def test_what_has_no_parameters_stays() -> None:
    alone = [Item()]
    assert chosen(alone) == alone
