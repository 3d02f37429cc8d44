# SPDX-License-Identifier: Apache-2.0
"""`tandemkv calibrate --policy look_ahead`: the fit by hand, and a whole run on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import Result
from tiny_calibrated import make_tiny_model
from typer.testing import CliRunner

from tandemkv.cache_rank.calibration.format import CalibrationError
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.fitted_queries import FittedQueries
from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec
from tandemkv.server.cli.commands import app
from tandemkv.server.evaluation.calibrate.look_ahead import Moments, QueryMeasurement
from tandemkv.server.evaluation.corpus import language_reference
from tandemkv.server.evaluation.tokenizing import load_tokenizer
from tandemkv.server.settings.launch_settings import ServeSettings


def test_the_fit_finds_what_is_linear_and_counts_what_is_missed() -> None:
    torch.manual_seed(0)
    x, noise = torch.randn(400, 6).double(), 0.1 * torch.randn(400, 5).double()
    weight, bias = torch.randn(6, 5).double(), torch.randn(5).double()
    missing = x @ weight + bias + noise
    query = missing + torch.randn(400, 5).double()
    moments = Moments(6, 5)
    for part in (slice(0, 150), slice(150, 400)):
        moments.add(x[part], missing[part], query[part])
    change, offset = moments.solve(1e-6)
    torch.testing.assert_close(change, weight, rtol=0, atol=0.05)
    torch.testing.assert_close(offset, bias, rtol=0, atol=0.05)
    # The variance is counted within each text.
    within = sum(float((part - part.mean(0)).square().sum()) for part in (query[:150], query[150:]))
    left = (missing - x @ change - offset).square().sum()
    assert moments.missed(change, offset) == pytest.approx(float(left) / within)
    nothing = torch.zeros(6, 5).double(), torch.zeros(5).double()
    assert moments.missed(*nothing) == pytest.approx(float(missing.square().sum()) / within)
    drawn, _ = moments.solve(1e6)
    assert float(drawn.abs().max()) < 1e-4  # to W_q, from which it is a change


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def calibrate(model: Path, out: Path) -> Result:
    arguments = ["calibrate", str(model), "--policy", "look_ahead", "--distance", "2"]
    sizes = ["--texts", "40", "--tokens", "100", "--out", str(out)]
    return CliRunner().invoke(app, [*arguments, *sizes])


@pytest.fixture(scope="module")
def fitted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "fit.safetensors"
    result = calibrate(tiny, out)
    assert result.exit_code == 0, result.output
    return out


def test_it_is_not_written_among_the_weights(tiny: Path) -> None:
    result = calibrate(tiny, tiny / "fit.safetensors")
    assert result.exit_code == 2
    assert "write it into another folder" in " ".join(result.output.split())
    assert not (tiny / "fit.safetensors").exists()


def test_a_whole_run_predicts_unseen_tokens_better_than_w_q(tiny: Path, fitted: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = read_model_spec(tiny, dtype="float32")
    file = FittedQueries(fitted, spec, 2)
    network = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    text = language_reference()[1200:1400]  # between two that were read
    with torch.no_grad():
        tokens = torch.tensor([load_tokenizer(tiny).encode(text, add_special_tokens=False)])
        states = network.model(tokens, output_hidden_states=True).hidden_states
    for number in (1, 2, 3):
        layer = network.model.layers[number]
        found = file.layer(number, range(48), dtype=torch.float32, device=torch.device("cpu"))
        assert found is not None
        with torch.no_grad():
            want = layer.self_attn.q_proj(layer.input_layernorm(states[number][0]))
            x = layer.input_layernorm(states[max(0, number - 2)][0])
            predictions = x @ found[0].T + found[1], layer.self_attn.q_proj(x)
        errors = [float((some - want)[4:].square().sum()) for some in predictions]
        assert errors[0] < 0.9 * errors[1], f"layer {number}: {errors}"


def test_serve_takes_the_file_for_its_distance_alone(tiny: Path, fitted: Path) -> None:
    spec = read_model_spec(tiny, dtype="float32")

    def settings(distance: int) -> ServeSettings:
        options = {"distance": distance, "predictor": str(fitted)}
        given = {"model": str(tiny), "selection": {"options": options}}
        return ServeSettings.model_validate(given)

    FittedQueries.of(settings(2).selection, spec)
    with pytest.raises(SettingsError, match="distance is 2, and 1 is served"):
        FittedQueries.of(settings(1).selection, spec)


def test_one_text_is_refused_and_so_is_a_fused_projection(tiny: Path) -> None:
    spec = read_model_spec(tiny, dtype="float32")
    measurement = QueryMeasurement(tiny, spec, dtype="float32", distance=1)
    measurement.add(range(1, 60))
    with pytest.raises(CalibrationError, match="one text is kept out; give two or more"):
        measurement.result()
    from tandemkv.server.evaluation.calibrate.look_ahead import _part

    with pytest.raises(CalibrationError, match="no q_proj in transformers"):
        _part(torch.nn.Identity(), "q_proj", spec)
