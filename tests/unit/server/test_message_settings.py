# SPDX-License-Identifier: Apache-2.0
"""What link ``message`` refuses before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.server import message_launch
from tandemkv.server.commands import app
from tandemkv.server.message_launch import message_launches, with_own_link
from tandemkv.server.settings import ServeSettings

_ADDRESS = "tcp://127.0.0.1:7400"


def _settings(**given: Any) -> ServeSettings:
    return ServeSettings.model_validate({"model": "smollm2", **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"transport": "message", "device": "cuda"}, "--device cpu"),
        ({"transport": "message", "tensor_parallel": 2, "cache_ranks": 2}, "--tp 1"),
        ({"transport": "message", "cache_ranks": 2}, "--cache-ranks 1"),
        ({"transport": "message", "evaluation": True}, "--transport shared"),
        ({"cache_rank_address": _ADDRESS}, "add --link-keys"),
        ({"cache_rank_address": "127.0.0.1:1", "link_keys": "k"}, "tcp://HOST:PORT"),
        ({"cache_rank_address": "tcp://0.0.0.0:1", "link_keys": "k"}, "every interface"),
        ({"cache_rank_address": _ADDRESS, "link_keys": "k", "cache_ranks": 0}, "leave"),
        ({"cache_rank_address": _ADDRESS, "link_keys": "k", "transport": "shared"}, "leave"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises((ValidationError, SettingsError), match=said):
        _settings(**given)


def test_an_address_means_the_link() -> None:
    found = _settings(cache_rank_address=_ADDRESS, link_keys="k")
    placement = found.rank_settings.placement
    assert (placement.link, placement.num_cache_ranks) == ("message", 1)
    assert placement.has_far_pool
    assert placement.has_far_host
    assert "another host" in placement.describe()


def test_the_other_host_may_have_a_name() -> None:
    found = _settings(cache_rank_address="tcp://tandemkv-cache-rank:7400", link_keys="k")
    assert found.wished_link == "message"


def test_addresses_that_may_come_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(message_launch, "run_far_rank", lambda *given: found.append(given))
    words = ["cache-rank", "--model", "smollm2", "--run-dir", str(tmp_path), "--address", _ADDRESS]
    for more in ([], ["--allow", "10.0.0.1,10.0.0.3"]):
        assert CliRunner().invoke(app, [*words, *more]).exit_code == 0
    assert [given[2:4] for given in found] == [
        (_ADDRESS, []),
        (_ADDRESS, ["10.0.0.1", "10.0.0.3"]),
    ]


def test_both_ends_here_have_keys_and_an_address_of_their_own(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    settings = with_own_link(_settings(transport="message"), run_dir)
    assert settings.cache_rank_address is not None
    assert settings.cache_rank_address.startswith("tcp://127.0.0.1:")
    far, near = message_launches(settings, run_dir, is_far_here=True)
    assert far.spec is not None
    assert near.spec is not None
    assert far.spec.argv[-2:] == ("--address", settings.cache_rank_address)
    assert "pump" in near.spec.argv
    (only,) = message_launches(settings, run_dir, is_far_here=False)
    assert only.spec == near.spec
    run_dir.clear()
    assert not list((tmp_path / "run").iterdir()), "nothing is left"
