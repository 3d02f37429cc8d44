# SPDX-License-Identifier: Apache-2.0
"""Files of fitted projections: read back by rows, and refused where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec import structs

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.fitted_queries import (
    FittedQueries,
    fitted_layers,
    stream_of,
    write_fitted_queries,
)
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec

MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=5,
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=3,
    hidden_size=8,
    max_context=100,
    dtype="float32",
    model_hash="h",
    windowed_layers=(3,),
)
CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    layers = {x: (torch.randn(12, 8), torch.randn(12)) for x in fitted_layers(MODEL)}
    write_fitted_queries(tmp_path / "fit.safetensors", MODEL, 2, layers, {"model_id": "m"})
    return tmp_path / "fit.safetensors"


def read(file: FittedQueries, layer: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    found = file.layer(layer, rows, dtype=torch.float64, device=CPU)
    assert found is not None
    return found


def test_rows_of_a_rank_are_those_of_the_whole(path: Path) -> None:
    file = FittedQueries(path, MODEL, 2)
    weight, bias = read(file, 2, range(12))
    parts = [read(file, 2, range(start, start + 6)) for start in (0, 6)]
    assert torch.equal(torch.cat([part[0] for part in parts]), weight)
    assert torch.equal(torch.cat([part[1] for part in parts]), bias)
    assert weight.shape == (12, 8)
    assert weight.dtype == torch.float64


def test_layers_without_a_projection_take_w_q(path: Path) -> None:
    """The first, one with a window, and late ones, whose stream is that of their own entry."""
    every = FittedQueries(path, MODEL, 2)
    late = FittedQueries(path, MODEL, 2, num_late=2)

    def layers(file: FittedQueries) -> list[int]:
        found = (file.layer(x, range(12), dtype=torch.float32, device=CPU) for x in range(5))
        return [number for number, parts in enumerate(found) if parts is not None]

    assert layers(every) == [1, 2, 4]
    assert layers(late) == [2, 4]


def test_the_first_layers_read_the_first_stream() -> None:
    assert [stream_of(layer, 2) for layer in range(5)] == [0, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "distance", "message"),
    [
        ({}, 1, "distance is 2, and 1 is served; make one with .*--distance 1 --out"),
        ({"num_layers": 6}, 2, "num_layers is 5, and 6 is served"),
        ({"head_dim": 4}, 2, "head_dim is 3, and 4 is served"),
        ({"windowed_layers": ()}, 2, r"layers\.3\.weight is None, not \(12, 8\); make the file"),
    ],
)
def test_a_file_of_something_else_is_refused(
    path: Path, changes: dict[str, object], distance: int, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        FittedQueries(path, structs.replace(MODEL, **changes), distance)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none: cannot be read .*tandemkv calibrate"):
        FittedQueries(tmp_path / "none", MODEL, 1)
    (tmp_path / "text").write_text("{}")
    with pytest.raises(SettingsError, match="text: cannot be read"):
        FittedQueries(tmp_path / "text", MODEL, 1)
    with pytest.raises(SettingsError, match="cannot be written"):
        write_fitted_queries(tmp_path / "no" / "such", MODEL, 1, {}, {})


def test_other_weights_of_the_shape_are_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    FittedQueries(path, MODEL, 2)
    assert not caplog.records
    FittedQueries(path, structs.replace(MODEL, model_hash="i"), 2)
    assert "fitted to other weights" in caplog.text
