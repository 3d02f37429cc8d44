# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in SGLang's ModelRunner on a CPU, beside requests of the model itself."""

from __future__ import annotations

from pathlib import Path

import program_runs
import pytest
import torch
from adapters_without_a_gpu import write_adapter
from program_runs import run_program
from tiny_models import LAYERS, LENGTHS, MODES, STEPS, Reference, write_model

pytestmark = pytest.mark.timeout(600)

NAME = "qwen3"
SHORT, LONG = range(len(LENGTHS))
QUERY_TOLERANCE = 5e-6
"""Of the largest element; float32 against float64."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a model with an adapter that the longer prompt names, and without one."""
    folder = tmp_path_factory.mktemp("runs")
    write_model(NAME, folder / "models" / NAME)
    write_adapter(folder / "models" / NAME, folder / "adapter")
    run_program(folder, NAME, "--adapter", NAME)
    return folder


def result(folder: Path, mode: str, end: str = "-adapter") -> dict[str, torch.Tensor]:
    return program_runs.result(folder / f"{NAME}-{mode}{end}.safetensors")


def test_exact_gives_stocks_tokens_with_an_adapter_and_beside_one(folder: Path) -> None:
    assert set(MODES) == {"stock", "exact", "sparse"}
    stock, exact = result(folder, "stock"), result(folder, "exact")
    assert torch.equal(exact["tokens"], stock["tokens"])
    assert float((exact["logits"] - stock["logits"]).abs().max()) < 1e-5
    assert exact["rows"].tolist() == [0, 0, STEPS * len(LENGTHS)]
    plain = result(folder, "stock", "")
    assert torch.equal(stock["tokens"][:, SHORT], plain["tokens"][:, SHORT])
    difference = (stock["logits"] - plain["logits"])[:, LONG].abs().amax(-1)
    assert float(difference.min()) > 1e-2, "the adapter changes nothing"


def test_requests_of_the_model_itself_are_predicted_as_without_adapters(folder: Path) -> None:
    """The projection is inside of SGLang's LoRA layer then."""
    loaded, plain = result(folder, "sparse"), result(folder, "sparse", "")
    assert torch.equal(loaded["weights"], plain["weights"])
    assert torch.equal(loaded["tokens"], plain["tokens"])
    reference = Reference(NAME, folder / "models" / NAME)
    assert set(loaded["layers"].tolist()) == set(range(LAYERS))
    for at, layer in enumerate(loaded["layers"].tolist()):
        want = reference.query(layer, loaded["streams"][at], loaded["positions"][at])
        error = (loaded["live"][at].double() - want).abs().max()
        assert float(error) < QUERY_TOLERANCE * float(want.abs().max())
