# SPDX-License-Identifier: Apache-2.0
"""``--speculative-algorithm NGRAM`` with policy exact: drafts of n-grams, verified densely.

SGLang compiles its n-grams at the first start. The sources of 0.5.17 lack an include that GCC asks
for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exactness import check_everywhere
from rank_servers import Server, ours

from tandemkv.inference_rank.sglang import versions as sglang_versions

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
DRAFTS = 6
NGRAMS = (
    *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(DRAFTS)),
    *("--speculative-ngram-max-bfs-breadth", "3"),
)


@pytest.fixture(scope="module")
def server(random_model: Path) -> Iterator[Server]:
    del random_model  # which it serves
    settings = {"cache_ranks": 0, "selection": {"policy": "exact"}, "sglang_args": list(NGRAMS)}
    is_oldest = sglang_versions.installed() == sglang_versions.OLDEST
    with ours(settings, environ={"CXX": "c++ -include cstddef"} if is_oldest else {}) as found:
        yield found


def test_tokens_equal_those_without_drafts(
    server: Server, prompts: list[list[int]], new_tokens: int, random_reference: list[Any]
) -> None:
    check_everywhere(server, prompts, random_reference, new_tokens=new_tokens)


def test_what_was_written_before_is_accepted(server: Server, token_ids: list[int]) -> None:
    """The second time the n-grams of the first time are drafts: several tokens in a step."""
    body: dict[str, Any] = {
        "input_ids": token_ids[900:1300],
        "sampling_params": {"max_new_tokens": 48, "temperature": 0, "ignore_eos": True},
    }
    first = server.generate(**body)
    before, _ = server.values()
    second = server.generate(**body)
    after, _ = server.values()
    assert second["text"] == first["text"]
    assert second["meta_info"]["completion_tokens"] == 48
    steps = after["decode_steps_total"] - before["decode_steps_total"]
    assert 48 / DRAFTS - 1 <= steps <= 24
    assert after["exact_rows_total"] - before["exact_rows_total"] == steps
    assert after["sparse_rows_total"] == 0
