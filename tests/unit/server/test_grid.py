# SPDX-License-Identifier: Apache-2.0
"""The file of settings, and the name by which reports of speed and of quality are joined."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandemkv.cache_rank.policies.registry import resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.server.evaluation.bench.configurations import from_grid
from tandemkv.server.evaluation.grid import (
    describe_setting,
    is_setting_name,
    read_grid,
    setting_name,
)
from tandemkv.server.plan.pages import on_device


def grid_of(tmp_path: Path, text: str, device: str = "cpu") -> dict[str, dict[str, object]]:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    return read_grid(path, device)


def test_entries_are_products_and_equal_settings_come_once(tmp_path: Path) -> None:
    found = grid_of(
        tmp_path,
        "points:\n"
        "  - {budget_tokens: [512, 1024], resident_factor: [1, 2], fetch_cap: [K/16, K]}\n"
        "  - {budget_tokens: 1024, fetch_cap: 64, sample_tokens: [0, 1024],"
        " exact_layers: [none, '0,1']}\n",
    )
    assert len(found) == 8 + 3  # K 1024, c 1, a cap of K/16 and 1024 samples are in both
    assert found["k512-c1-cap32-s512-native-xnone"]["fetch_cap"] == 32
    assert found["k1024-c1-cap64-s0-native-x0.1"]["exact_layers"] == [0, 1]
    assert list(found) == sorted(set(found), key=list(found).index)


def test_settings_that_no_name_tells_apart_are_refused(tmp_path: Path) -> None:
    """The second of them would not be measured."""
    text = "points: [{budget_tokens: 512, num_recent_tokens: [64, 128]}]"
    with pytest.raises(SettingsError, match="no place for num_recent_tokens"):
        grid_of(tmp_path, text)
    # What a policy never reads makes no difference.
    found = grid_of(tmp_path, "points: [{policy: streaming, index_dtype: [native, int8]}]")
    assert len(found) == 1


def test_a_gpu_has_an_int4_index_unless_told_otherwise(tmp_path: Path) -> None:
    text = "points: [{budget_tokens: 512, index_dtype: [native, int4]}, {budget_tokens: 512}]"
    assert list(grid_of(tmp_path, text, "cuda")) == [
        "k512-c1-cap256-s512-native-xnone",
        "k512-c1-cap256-s512-int4-xnone",
    ]
    assert list(grid_of(tmp_path, "points: [{budget_tokens: 512}]")) == [
        "k512-c1-cap256-s512-native-xnone"
    ]


def test_streaming_is_named_by_its_tokens(tmp_path: Path) -> None:
    found = grid_of(tmp_path, "points: [{budget_tokens: 512}]\nstreaming: [2180]")
    selection = resolve_selection(found["streaming-2180"])
    assert (selection.policy, selection.row_tokens) == ("streaming", 2180)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("points: []", "points"),
        ("- 1", "it has `points`"),
        ("points: [{budget: 3}]", "budget is no setting of the group selection"),
        ("points: [{budget_tokens: 20}]", "raise --budget-tokens"),
        ("points: [{policy: none_such}]", "is unknown"),
        ("points: [", "cannot be read"),
        ("points: [{budget_tokens: 64, fetch_cap: K/0}]", "fetch_cap: Input should be a valid int"),
    ],
)
def test_errors_name_the_file_and_the_entry(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=rf"(?s)grid\.yaml.*{message}"):
        grid_of(tmp_path, text)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_grid(tmp_path / "none.yaml", "cpu")


@pytest.mark.parametrize(
    ("values", "name", "described"),
    [
        ({}, "k896-c1-cap448-s1024-native-xnone", "K 896, c 1, cap 448, 1024 samples, native"),
        (
            {"policy": "async_spade", "budget_tokens": 256, "resident_factor": 1.5},
            "async_spade-k256-c1.5-cap128-s0-native-x0.1",
            "async_spade, K 256, c 1.5, cap 128, no samples, native, layers 0, 1 exact",
        ),
    ],
)
def test_names_are_read_back(values: dict[str, object], name: str, described: str) -> None:
    assert setting_name(resolve_selection(values)) == name
    assert is_setting_name(name)
    assert describe_setting(name) == described


def test_other_texts_are_no_names() -> None:
    for text in ("dense-tp1", "in-process-tp1-samples", "12.5%", "k1024"):
        assert not is_setting_name(text)
        assert describe_setting(text) == text


def test_bench_refuses_a_grid_whose_names_no_figure_can_have(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    layers = ",".join(map(str, range(40)))
    path.write_text(f"points: [{{budget_tokens: 512, exact_layers: '{layers}'}}]")
    with pytest.raises(SettingsError, match=r"name=grid-k512-.* at most 110 characters"):
        from_grid(path)


def test_bench_times_exactly_the_settings_that_the_grid_names(tmp_path: Path) -> None:
    """Resolved as on a GPU, so that its name and that of `quality --grid` there are one."""
    path = tmp_path / "grid.yaml"
    path.write_text("points: [{budget_tokens: 512, fetch_cap: K/16}]\nstreaming: [2180]")
    found = from_grid(path)
    assert list(found) == ["grid-k512-c1-cap32-s512-int4-xnone", "grid-streaming-2180"]
    for name, configuration in found.items():
        settings = configuration.serve_settings(
            model_dir=tmp_path, capacity_tokens=1 << 20, batch=8
        )
        assert f"grid-{setting_name(settings.selection)}" == name
        assert settings.cache_ranks == 0
        assert settings.selection.dense_tokens == 0
        assert settings.stress_selection == ("streaming" not in name)
    sparse = found["grid-k512-c1-cap32-s512-int4-xnone"].settings
    assert sparse["selection.num_recent_tokens"] == 128


def test_the_example_is_a_grid() -> None:
    example = Path(__file__).resolve().parents[3] / "docs/quality/grid.yaml"
    found = read_grid(example, "cuda")
    assert 10 <= len(found) <= 30
    assert "streaming-2052" in found
    assert setting_name(on_device(SelectionSettings(), "cuda")) in found
