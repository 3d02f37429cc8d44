# SPDX-License-Identifier: Apache-2.0
"""Quantised models through SGLang's ModelRunner on a CPU, with stand-ins for its kernels.

SGLang reads the files and builds the modules; `quantised_without_a_gpu` multiplies. ``W_q`` and
queries are compared with a checkpoint in float64 that has the numbers of the quantised one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import quantised_models
import torch
from program_runs import Found, chosen, found_of, run_program
from quantised_models import write_quantised
from safetensors.torch import load_file
from tiny_models import LAYERS, LENGTHS, STEPS, Reference

pytestmark = pytest.mark.timeout(600)

SHORT, LONG = range(len(LENGTHS))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the models that the chosen tests need, one after the other in one process."""
    folder = tmp_path_factory.mktemp("runs")
    names = chosen(request, quantised_models.MODELS)
    for name in names:
        write_quantised(name, folder / "models" / name, folder / "plain" / name)
    run_program(folder, *names)
    return folder


@pytest.fixture
def found(request: pytest.FixtureRequest, runs: Path) -> Found:
    """Results of one model, and the folder of its twin in float64."""
    return found_of(runs, request.param, runs / "plain" / request.param)


every_model = pytest.mark.parametrize("found", quantised_models.MODELS, indirect=True)


@every_model
def test_exact_gives_the_tokens_of_stock(found: Found) -> None:
    assert torch.equal(found.exact["tokens"], found.stock["tokens"])
    assert float((found.exact["logits"] - found.stock["logits"]).abs().max()) < 1e-5
    assert len(found.stock["tokens"].unique()) > 4, "the model says the same whatever it is asked"


@every_model
def test_a_longer_prompt_is_attended_to_in_part(found: Found) -> None:
    assert torch.equal(found.sparse["tokens"][:, SHORT], found.stock["tokens"][:, SHORT])
    assert found.sparse["rows"].tolist() == [STEPS, STEPS, 0]
    difference = (found.sparse["logits"] - found.stock["logits"])[:, LONG].abs().amax(-1)
    assert float(difference[1]) > 1e-2


@every_model
def test_the_weights_are_those_of_float64_rounded_once(found: Found) -> None:
    tensors = load_file(found.folder / "model.safetensors")
    weights = found.sparse["weights"]
    assert len(weights) == LAYERS
    for layer, weight in enumerate(weights):
        prefix = f"model.layers.{layer}.self_attn"
        name = next(x for x in ("q_proj", "qkv_proj") if f"{prefix}.{x}.weight" in tensors)
        want = tensors[f"{prefix}.{name}.weight"][: len(weight)]
        assert want.dtype == torch.float64
        assert torch.equal(weight, want.to(weight.dtype)), layer


@every_model
def test_queries_equal_float64_of_their_streams(found: Found) -> None:
    """In one operation, in another process, and module by module."""
    assert set(found.sparse["layers"].tolist()) == set(range(LAYERS))
    base = quantised_models.MODELS[found.name].base
    Reference(base, found.folder).check_queries(found.sparse)
