# SPDX-License-Identifier: Apache-2.0
"""Policy exact gives the tokens of stock SGLang."""

from __future__ import annotations

from typing import Any

import pytest
from exactness import check_everywhere
from rank_servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_tokens_equal_stock(
    exact_server: Server, prompts: list[list[int]], new_tokens: int, reference: list[Any]
) -> None:
    check_everywhere(exact_server, prompts, reference, new_tokens=new_tokens)
    assert exact_server.values()[0]["exact_rows_total"] > 0
