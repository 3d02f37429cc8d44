# SPDX-License-Identifier: Apache-2.0
"""`tandemkv calibrate --index-channels`: what is kept, a whole run, and what others make of it."""

from __future__ import annotations

import io
import json
import re
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import Result
from rich.console import Console
from safetensors import safe_open
from tiny_calibrated import make_tiny_model
from typer.testing import CliRunner

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.index_channels import read_index_channels
from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings, SelectionSettings
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.runtime import Runtime
from tandemkv.server.checks.preflight import check_selection
from tandemkv.server.cli.commands import app
from tandemkv.server.cli.status_view import status_table
from tandemkv.server.evaluation.calibrate.index_channels import ChannelMeasurement, keep
from tandemkv.server.evaluation.corpus import language_reference
from tandemkv.server.evaluation.quality.served import differences, named
from tandemkv.server.evaluation.tokenizing import load_tokenizer
from tandemkv.server.settings.launch_settings import ServeSettings


def test_what_is_kept_changes_scores_least() -> None:
    """Of independent channels those of most; of two that cancel each other both or none."""
    alone = torch.diag_embed(torch.tensor([[5.0, 1.0, 4.0, 3.0], [1.0, 2.0, 9.0, 8.0]]).double())
    kept = keep(alone, 2)
    assert kept.channels.tolist() == [[0, 2], [2, 3]]
    assert kept.share == pytest.approx((9 / 13 + 17 / 20) / 2)
    cancels = torch.diag(torch.tensor([5.0, 4.9, 1.0, 1.2]).double())
    cancels[0, 1] = cancels[1, 0] = -4.9
    assert keep(cancels[None], 3).channels.tolist() == [[0, 1, 3]]
    assert keep(cancels[None], 4).share == pytest.approx(1.0)


def test_dropping_one_after_another_is_near_the_best_choice() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 50, 6).double(), torch.randn(2, 50, 6).double()
    products = (queries.mT @ queries) * (keys.mT @ keys)
    found = keep(products, 4)
    for head in range(2):
        every = combinations(range(6), 2)
        lost = {x: float(products[head][list(x)][:, list(x)].sum()) for x in every}
        dropped = tuple(sorted(set(range(6)) - set(found.channels[head].tolist())))
        assert lost[dropped] <= 1.5 * min(lost.values())  # one after another, not all at once


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=64)


def calibrate(model: Path, out: Path, *more: str) -> Result:
    sizes = ["--texts", "8", "--tokens", "100", "--out", str(out)]
    return CliRunner().invoke(app, ["calibrate", str(model), *sizes, *more])


@pytest.fixture(scope="module")
def found(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "channels.safetensors"
    result = calibrate(tiny, out, "--index-channels", "32")
    assert result.exit_code == 0, result.output
    assert "32 of 64 channels make" in " ".join(result.output.split())
    return out


def test_a_whole_run_finds_what_scores_of_unseen_text_rest_on(tiny: Path, found: Path) -> None:
    """Their scores are nearer than those of the other half of the channels."""
    spec = read_model_spec(tiny, dtype="float32")
    text = load_tokenizer(tiny).encode(language_reference()[1200:2400], add_special_tokens=False)
    measurement = ChannelMeasurement(tiny, spec, dtype="float32")
    measurement.add(text)
    selection = SelectionSettings(index_channels=str(found))
    channels = read_index_channels(selection, range(spec.num_layers), range(spec.num_kv_heads))
    assert set(channels) == set(range(spec.num_layers))
    for layer, of_layer in channels.items():
        products = measurement.products(layer)
        for head, kept in enumerate(of_layer):
            others = sorted(set(range(64)) - set(kept.tolist()))
            missed = products[head][others][:, others].sum()
            assert missed < products[head][kept][:, kept].sum()


def test_texts_are_as_long_as_the_model_takes(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "channels.safetensors"
    arguments = ["calibrate", str(tiny), "--index-channels", "32", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    longest = read_model_spec(tiny, dtype="float32").max_context
    with safe_open(out, "pt") as file:
        assert file.metadata()["num_tokens"] == str(3 * longest)


def test_two_measurements_of_a_process_read_each_its_own_texts(tiny: Path) -> None:
    spec = read_model_spec(tiny, dtype="float32")
    one, other = (ChannelMeasurement(tiny, spec, dtype="float32") for _ in "ab")
    one.add(range(1, 60))
    assert one.products(1).any()
    assert not other.products(1).any()


def settings_for(tiny: Path, path: Path | str, **selection: object) -> ServeSettings:
    given = {"index_channels": str(path), "index_dtype": "int8", **selection}
    return ServeSettings.model_validate({"model": str(tiny), "selection": given})


def test_a_report_of_quality_says_how_many(tiny: Path, found: Path) -> None:
    with_file, without = named(settings_for(tiny, found)), named(ServeSettings(model=str(tiny)))
    assert with_file["index_channels"] == 32
    assert differences(with_file, without)["index_channels"] == (32, None)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"index_dtype": "native"}, "index_dtype=native scans keys where they lie"),
        ({"policy": "quest"}, "policy=quest scans no index of keys"),
        ({"policy": "exact"}, "policy=exact scans no index of keys"),
        ({"index_channels": "/no/such"}, "/no/such: cannot be read"),
    ],
)
def test_serve_refuses_it(
    tiny: Path, found: Path, selection: dict[str, object], message: str
) -> None:
    spec = read_model_spec(tiny, dtype="float32")
    check_selection(settings_for(tiny, found), spec)
    with pytest.raises(SettingsError, match=message):
        check_selection(settings_for(tiny, found, **selection), spec)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "out goes with --policy or --index-channels"),
        (("--policy", "look_ahead", "--index-channels", "32"), "a file is for one"),
        (("--index-channels", "40"), "must be a multiple of 32"),
        (("--index-channels", "64"), "keys of .* have 64; give fewer"),
    ],
)
def test_calibrate_refuses_it(
    tiny: Path, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    result = calibrate(tiny, tmp_path / "out", *more)
    assert result.exit_code == 2
    assert re.search(message, " ".join(result.output.split()))


def test_plan_counts_the_channels_of_the_file(tiny: Path, found: Path) -> None:
    command = ["plan", "--model", str(tiny), "--context", "4k", "--policy", "look_ahead"]
    few, all_ = (
        json.loads(CliRunner().invoke(app, [*command, "--json", *more]).stdout)
        for more in (["--index-channels", str(found)], [])
    )
    assert (few["workload"]["index_channels"], all_["workload"]["index_channels"]) == (32, None)
    of_few, of_all = (x["placements"][1] for x in (few, all_))
    keys = [x["bytes_per_gpu"]["inference"]["key_index"] for x in (of_few, of_all)]
    assert keys[0] * 2 == keys[1]
    assert of_few["predicted"]["selection_ms"] < of_all["predicted"]["selection_ms"]
    shown = CliRunner().invoke(app, [*command, "--index-channels", str(found)]).output
    assert "int4 index of 32 of 64 channels" in " ".join(shown.split())
    assert f"--index-channels {found}" in shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--model", "qwen3-8b"), "make one with"),
        (("--index-dtype", "native"), "index_dtype=native scans keys where they lie"),
        (("--policy", "quest"), "policy=quest scans no index of keys"),
    ],
)
def test_plan_refuses_what_serve_would(
    tiny: Path, found: Path, more: tuple[str, ...], message: str
) -> None:
    command = ["plan", "--model", str(tiny), "--index-channels", str(found), *more]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_status_says_how_many(tiny: Path, found: Path) -> None:
    """The rank does, which has read the file; who asks needs none."""
    for path, shown in ((str(found), "32 of 64"), (None, None)):
        runtime = Runtime(
            settings=RankSettings(selection=SelectionSettings(index_channels=path)),
            model=read_model_spec(tiny, dtype="float32"),
            counters=Counters(),
            resident_bytes=0,
            occupancy=SimpleNamespace(values=dict),  # type: ignore[arg-type]
        )
        info = runtime.reply(epoch=1, ready=True, values={}, info={}).info
        assert info.get("index_channels") == shown
        console = Console(width=100, file=io.StringIO(), record=True)
        console.print(status_table({"inference_rank": {"info": info}}, "http://127.0.0.1:1"))
        rows = [" ".join(line.split()) for line in console.export_text().splitlines()]
        assert [row for row in rows if "index channels" in row] == (
            ["│ │ index channels │ 32 of 64 │"] if shown else []
        )
