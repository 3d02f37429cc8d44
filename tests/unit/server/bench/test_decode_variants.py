# SPDX-License-Identifier: Apache-2.0
"""What `tests/bench/decode_variants.py` sets, and how it says that it cannot."""

import importlib
import inspect
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tandemkv.inference_rank import decode_bench
from tandemkv.kernels.triton_ops import query

_BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(_BENCH)
    return importlib.import_module("decode_variants")


def test_takes_the_place_of_what_the_driver_runs(variants: ModuleType) -> None:
    ours, drivers = (inspect.signature(x.run_rank) for x in (variants, decode_bench))
    assert list(ours.parameters) == list(drivers.parameters)


def test_sets_and_gives_back_items_of_modules_and_of_the_rank(
    variants: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = query.TILES["int8"]
    monkeypatch.setitem(query.TILES, "int8", tiles)
    rank = SimpleNamespace(late_layers=(0,))
    text = "kernels.triton_ops.query.TILES.int8=(64,128,4,4,256,96); rank.late_layers=()"
    parsed = variants.parse(text)
    before = [variants.assign(path, value, {"rank": rank}) for path, value in parsed]
    assert query.TILES["int8"] == query.Tiles(64, 128, 4, 4, 256, 96)
    assert isinstance(query.TILES["int8"], query.Tiles)
    assert rank.late_layers == ()
    for (path, _), value in zip(parsed, before, strict=True):
        variants.assign(path, value, {"rank": rank})
    assert query.TILES["int8"] == tiles
    assert rank.late_layers == (0,)
    assert variants.parse("") == []


@pytest.mark.parametrize(
    "path", ["kernels.triton_ops.query.NONE", "nowhere.at_all", "rank", "rank.lanes", "kernels"]
)
def test_refuses_what_is_not_there(variants: ModuleType, path: str) -> None:
    with pytest.raises(SystemExit, match=f"{path}: there is no such attribute"):
        variants.follow(path.split("."), {"rank": SimpleNamespace(late_layers=())})


def test_refuses_a_path_without_a_value(variants: ModuleType) -> None:
    with pytest.raises(SystemExit, match="write path=value"):
        variants.parse("rank.late_layers")
