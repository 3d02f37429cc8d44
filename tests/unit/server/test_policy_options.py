# SPDX-License-Identifier: Apache-2.0
"""Options of policies: how they are given, what errors say, and how they are listed."""

import json
from pathlib import Path

import own_policy
import pytest
from typer.testing import CliRunner

from tandemkv.cache_rank.policies.registry import POLICIES, find_policy, options_of
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.cli.commands import app
from tandemkv.server.settings.sources import (
    Sourced,
    load_settings,
    read_assignments,
    to_yaml,
)

OWN = "own_policy:NewestFirst"


def load(*texts: str, policy: str = "sfi", environ: dict[str, str] | None = None, config=None):
    flags = {"model": Sourced("m", "MODEL"), **read_assignments(texts)}
    if policy:
        flags["selection.policy"] = Sourced(policy, "--policy")
    return load_settings(flags, environ or {}, config)


def options(settings) -> dict[str, object]:
    return options_of(find_policy(settings.selection.policy), settings.selection).model_dump()


def write(path: Path, text: str) -> Path:
    file = path / "serve.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_they_come_from_flags_environment_and_files_in_that_order(tmp_path: Path) -> None:
    file = write(tmp_path, "policy_options: {sfi: {max_interval: 2, window: 3, alpha: 0.25}}")
    environ = {"TANDEMKV_SERVE_POLICY_OPTIONS__SFI__WINDOW": "4"}
    found = options(load("sfi.max_interval=8", environ=environ, config=file))
    assert (found["max_interval"], found["window"], found["alpha"]) == (8, 4, 0.25)
    assert found["nms"] == 0.5


def test_the_environment_may_hold_a_mapping() -> None:
    environ = {"TANDEMKV_SERVE_POLICY_OPTIONS": f'{{"{OWN}": {{"skip": 3}}}}'}
    assert options(load(policy=OWN, environ=environ)) == {"skip": 3}


def test_a_policy_outside_of_the_package_has_options_too(tmp_path: Path) -> None:
    assert options(load(f"{OWN}.skip=5", policy=OWN)) == {"skip": 5}
    file = write(tmp_path, f'policy_options: {{"{OWN}": {{skip: 6}}}}')
    assert options(load(policy=OWN, config=file)) == {"skip": 6}
    with pytest.raises(SettingsError, match=r"NewestFirst\.skip=65: .*accepted: integer 0 to 64"):
        load(f"{OWN}.skip=65", policy=OWN)
    assert own_policy.NewestOptions().skip == 0


def test_what_is_declared_follows_the_options() -> None:
    declared = load("sfi.max_interval=9", "sfi.triggers=?").selection.declared
    assert (declared.refresh_interval, declared.refresh_triggers) == (9, "?")
    assert load("look_ahead.distance=3", policy="").selection.declared.layers_ahead == 3
    assert load("sync_kv.stride=7", policy="sync_kv").selection.declared.refresh_interval == 7


@pytest.mark.parametrize(
    ("texts", "policy", "expected"),
    [
        (["sfi.max_intervall=8"], "sfi", ["policy=sfi", "did you mean sfi.max_interval?"]),
        (["sfi.x=8"], "sfi", ["sfi.x", "it has: max_interval, triggers"]),
        (["sfi.max_interval=0"], "sfi", ["sfi.max_interval=0", "integer 1 to 65536", "--set"]),
        (["sfi.max_interval=x"], "sfi", ["sfi.max_interval=x", "valid integer", "default 64"]),
        (["sfi.alpha=2"], "sfi", ["sfi.alpha=2", "0.001 to 1"]),
        (["lfps.bypass=all"], "lfps", ["lfps.bypass=all", "sink_and_mean|sink|mean"]),
        (["sync_kv.union=perhaps"], "sync_kv", ["sync_kv.union=perhaps", "true|false"]),
        (["streaming.x=1"], "streaming", ["policy=streaming has no options"]),
        (["sfi.window=4"], "quest", ["policy=quest is chosen", "add --policy sfi"]),
        (["sfl.window=4"], "sfi", ["sfl.window", "did you mean sfi.window?"]),
        (["max_interval=4"], "sfi", ["did you mean sfi.max_interval?"]),
        (["sfi.window"], "sfi", ["--set sfi.window: NAME=VALUE is required"]),
    ],
)
def test_errors_name_option_policy_and_what_is_allowed(
    texts: list[str], policy: str, expected: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(*texts, policy=policy)
    for part in expected:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "policy_options: 3",
        "policy_options: {sfi: 3}",
        "policy_options: {sfy: {window: 3}}",
        "policy_options: {sfi: {window: many}}",
        "policy_options: {sfi: {window: 3.5}}",
        "policy_options: {quest: {pages: 3}}",
    ],
)
def test_files_are_checked_whatever_policy_is_chosen(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=r"serve\.yaml"):
        load(policy="sfi", config=write(tmp_path, text))


def test_a_file_may_hold_the_options_of_several_policies(tmp_path: Path) -> None:
    file = write(tmp_path, "policy_options: {sfi: {window: 3}, quest: {page_tokens: 8}}")
    assert options(load(policy="quest", config=file)) == {"page_tokens": 8}
    assert options(load(policy="sfi", config=file))["window"] == 3
    assert load(policy="look_ahead", config=file).selection.options == {}


def test_settings_with_options_survive_yaml_and_json(tmp_path: Path) -> None:
    given = load("async_spade.sign=-1", "async_spade.eps=1e-3", policy="async_spade")
    assert given.selection.options == {"sign": -1, "eps": 1e-3}
    text = to_yaml(given)
    assert "policy_options:\n  async_spade:\n    window: 16" in text
    again = load_settings({}, {}, write(tmp_path, text))
    assert again.selection == given.selection
    ranks = given.rank_settings
    assert type(ranks).model_validate_json(ranks.model_dump_json()) == ranks
    assert ranks.flat()["selection.options.sign"] == "-1"


def test_every_option_can_be_given_as_text() -> None:
    """A command line has nothing else."""
    for name in POLICIES:
        for option, default in find_policy(name).options_model().model_dump().items():
            found = load(f"{name}.{option}={default}", policy=name)
            assert options(found)[option] == default, (name, option)


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ([], {"TANDEMKV_SERVE_SELECTION__LFPS_ROWS": "8"}, "did you mean "),
        (["--set", "cache.capacity_tokens=4k", "--cache-tokens", "8k"], {}, "set the same"),
    ],
)
def test_a_command_line_says_so_in_one_line(
    arguments: list[str], environ: dict[str, str], expected: str
) -> None:
    result = CliRunner().invoke(app, ["serve", "m", "--print-settings", *arguments], env=environ)
    assert result.exit_code == 2
    assert expected in result.output
    assert result.output.count("\n") == 1


def test_set_takes_any_setting() -> None:
    found = load("selection.budget_tokens=2048", "port=7")
    assert (found.selection.budget_tokens, found.port) == (2048, 7)


def test_policies_are_listed_with_their_options() -> None:
    result = CliRunner().invoke(app, ["policies"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    for name in POLICIES:
        assert f" {name} " in result.output
    shown = CliRunner().invoke(app, ["policies", "sfi"], env={"COLUMNS": "80"}).output
    for option, field in find_policy("sfi").options_model.model_fields.items():
        assert option in shown
        assert str(field.description).split()[0] in shown
    assert "--set sfi.max_interval=VALUE" in shown
    assert "has no options" in CliRunner().invoke(app, ["policies", "exact"]).output
    own = json.loads(CliRunner().invoke(app, ["policies", OWN, "--json"]).output)[OWN]
    assert own["options"]["skip"]["default"] == 0
    wrong = CliRunner().invoke(app, ["policies", "sfy"])
    assert wrong.exit_code == 2
    assert "known: async_spade" in wrong.output
