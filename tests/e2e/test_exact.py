# SPDX-License-Identifier: Apache-2.0
"""Policy exact gives the tokens of stock SGLang."""

from __future__ import annotations

from typing import Any

import pytest
from exactness import compare, flush, run
from rank_servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_tokens_equal_stock(
    exact_server: Server, prompts: list[list[int]], new_tokens: int, reference: list[Any]
) -> None:
    alone = compare(run(exact_server, prompts, new_tokens=new_tokens, at_once=1), reference)
    assert alone["pass"], alone
    warm = compare(run(exact_server, prompts, new_tokens=new_tokens, at_once=4), reference)
    assert warm["pass"], f"with radix hits, four at a time: {warm}"
    assert warm["cached_tokens"] > 0
    flush(exact_server)
    cold = compare(run(exact_server, prompts, new_tokens=new_tokens, at_once=4), reference)
    assert cold["pass"], f"after a flush, four at a time: {cold}"
    assert exact_server.values()[0]["exact_rows_total"] > 0
