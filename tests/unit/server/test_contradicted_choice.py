# SPDX-License-Identifier: Apache-2.0
"""A placement is chosen among those that the given settings allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from placement_world import gpus as gpus
from placement_world import resolve

from tandemkv.cache_rank.protocol.errors import SettingsError


@pytest.mark.parametrize("given", [{"dense_tokens": 8192}, {"dense_batch_tokens": 65536}])
def test_what_a_pair_would_refuse_is_served_in_process(
    tmp_path: Path, gpus: Any, given: dict[str, int]
) -> None:
    selection = {"budget_tokens": 2048, "index_dtype": "int4", "exact_layers": []}
    cache = {"capacity_tokens": 8 * 32768}
    gpus(2)
    settings, said = resolve(tmp_path, tensor_parallel=1, cache=cache)
    assert settings.cache_ranks == 1, said
    asked: dict[str, Any] = {"tensor_parallel": 1, "cache": cache, "selection": selection | given}
    settings, said = resolve(tmp_path, **asked)
    assert settings.cache_ranks == 0, said
    (name,) = given
    assert any(line.startswith(f"1+1 is not chosen from, because serve would refuse it: {name}=")
               for line in said), said  # fmt: skip
    with pytest.raises(SettingsError, match=f"{name}=.*add --cache-ranks 0"):
        resolve(tmp_path, cache_ranks=1, **asked)


def test_a_standby_gets_a_cache_rank_in_a_process_of_its_own(tmp_path: Path, gpus: Any) -> None:
    gpus(2)
    assert resolve(tmp_path)[0].cache_ranks == 0
    settings, said = resolve(tmp_path, standby=True)
    assert (settings.cache_ranks, settings.wished_link) == (1, "shared"), said
    gpus(1)
    with pytest.raises(SettingsError, match="standby needs a cache rank in a process of its own"):
        resolve(tmp_path, standby=True)
