# SPDX-License-Identifier: Apache-2.0
"""Exact modes give the tokens of stock SGLang."""

from __future__ import annotations

from typing import Any

import pytest
from exactness import compare, flush, run
from rank_servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", ["exact_server", "covering_server"])
def test_tokens_equal_stock(
    name: str,
    prompts: list[list[int]],
    new_tokens: int,
    reference: list[Any],
    request: pytest.FixtureRequest,
) -> None:
    server: Server = request.getfixturevalue(name)
    alone = compare(run(server, prompts, new_tokens=new_tokens, at_once=1), reference)
    assert alone["pass"], alone
    warm = compare(run(server, prompts, new_tokens=new_tokens, at_once=4), reference)
    assert warm["pass"], f"with radix hits, four at a time: {warm}"
    flush(server)
    cold = compare(run(server, prompts, new_tokens=new_tokens, at_once=4), reference)
    assert cold["pass"], f"after a flush, four at a time: {cold}"
    inference, cache = server.values()
    assert cache["stale_reads_total"] == 0
    assert inference["restored_tokens_total"] > 0, "no radix hit went through the cache rank"
    if name == "exact_server":
        assert inference["exact_rows_total"] > 0
    else:
        assert inference["packs_total"] > 0
        assert cache["fetched_rows_total"] > 0
