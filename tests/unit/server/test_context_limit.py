# SPDX-License-Identifier: Apache-2.0
"""What is to be changed in config.json for a longer context, and that it is taken then."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from placement_world import CONFIG, SPEC

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.attention_config import rope_type
from tandemkv.cache_rank.protocol.models.model_spec import read_config
from tandemkv.server.checks.context_limit import how_to_extend
from tandemkv.server.checks.preflight import check_model
from tandemkv.server.plan.shape import find_shape
from tandemkv.server.settings.launch_settings import ServeSettings

QWEN = {**CONFIG, "max_position_embeddings": 40960, "rope_scaling": None}
LAUNCH_PAGE = Path(__file__).parents[3] / "docs" / "launch.md"


def changes_in(text: str) -> dict[str, Any]:
    found = re.search(r'"max_position_embeddings": \d+,\s*"rope_scaling": \{[^}]*\}', text)
    assert found is not None, text
    changes: dict[str, Any] = json.loads("{" + found.group() + "}")
    return changes


def settings_of(model_dir: Path) -> ServeSettings:
    given = {"model": str(model_dir), "max_context": 65536, "cache": {"capacity_tokens": "512k"}}
    return ServeSettings.model_validate(given)


def test_a_refusal_says_what_makes_it_go_away(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="longer than the 40960 tokens") as caught:
        check_model(settings_of(tmp_path), SPEC, QWEN)
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, **changes_in(str(caught.value))}))
    changed = read_config(tmp_path)
    check_model(settings_of(tmp_path), SPEC, changed)
    assert find_shape(str(tmp_path)).max_context == 65536
    assert rope_type(changed) == "yarn"


def test_the_page_says_the_same() -> None:
    page = changes_in(LAUNCH_PAGE.read_text(encoding="utf-8"))
    assert page == changes_in(how_to_extend(QWEN, 65536))


@pytest.mark.parametrize(
    ("tokens", "factor"), [(65536, 2.0), (131072, 4.0), (49152, 1.5), (41000, 1.3)]
)
def test_the_factor_is_that_of_the_context(tokens: int, factor: float) -> None:
    changes = changes_in(how_to_extend(QWEN, tokens))
    assert changes["max_position_embeddings"] == tokens
    assert changes["rope_scaling"] == {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32768,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, 65536),
        ({"max_position_embeddings": 262144}, 300000),
        ({}, 200000),
    ],
)
def test_what_no_card_is_known_for_is_left_to_the_card(
    changes: dict[str, Any], tokens: int
) -> None:
    text = how_to_extend(QWEN | changes, tokens)
    assert "as its card says" in text
    assert "factor" not in text
