# SPDX-License-Identifier: Apache-2.0
"""Every architecture of the list: tokens of stock SGLang, and queries of the model's definition.

A tiny random model of each runs through SGLang's ModelRunner on a CPU. ``docs/models.md`` has what
these tests show.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from program_runs import Found, chosen, found_of, result, run_program
from safetensors.torch import load_file
from tiny_models import LENGTHS, MODELS, STEPS, Reference, prompts, write_model

from tandemkv.cache_rank.protocol.models.architectures import ARCHITECTURES
from tandemkv.cache_rank.protocol.models.model_spec import read_config, read_model_spec
from tandemkv.server.checks.tensor_shapes import check_shapes
from tandemkv.server.plan.shape import shape_of_config

pytestmark = pytest.mark.timeout(600)

SHORT, LONG = range(len(LENGTHS))
STREAM_TOLERANCE = dict.fromkeys(MODELS, 1e-5) | {"apertus": 2e-3}
"""SGLang keeps the constants of Apertus' activation in bfloat16, which moves its streams."""
EXACT_TOLERANCE = dict.fromkeys(MODELS, 1e-5) | {"gpt-oss": 1e-4}
"""Both are SGLang's attention, but for sinks: stock's are by definition, in another order."""
LOGIT_TOLERANCE = dict.fromkeys(MODELS, 1e-4) | {"apertus": 5e-3}
"""Of the largest logit."""


OTHER_PROCESS = ("glm4", "gemma3", "gpt-oss")
"""The models most unlike Llama are also run with a cache rank in another process."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the models that the chosen tests need, one after the other in one process."""
    folder = tmp_path_factory.mktemp("runs")
    names = chosen(request, MODELS)
    for name in names:
        write_model(name, folder / "models" / name)
    run_program(folder, *names, "--cache-rank", *(name for name in OTHER_PROCESS if name in names))
    return folder


@pytest.fixture
def found(request: pytest.FixtureRequest, runs: Path) -> Found:
    """Results of one model."""
    return found_of(runs, request.param, runs / "models" / request.param)


every_model = pytest.mark.parametrize("found", MODELS, indirect=True)


def test_every_architecture_has_a_model() -> None:
    assert {model.architecture for model in MODELS.values()} == set(ARCHITECTURES)


@every_model
def test_exact_gives_the_tokens_of_stock(found: Found) -> None:
    assert torch.equal(found.exact["tokens"], found.stock["tokens"])
    difference = (found.exact["logits"] - found.stock["logits"]).abs().max()
    assert float(difference) < EXACT_TOLERANCE[found.name]
    assert found.exact["rows"].tolist() == [0, 0, STEPS * len(LENGTHS)]
    assert len(found.stock["tokens"].unique()) > 4, "the model says the same whatever it is asked"


@every_model
def test_what_fits_the_resident_set_gives_the_tokens_of_stock(found: Found) -> None:
    assert torch.equal(found.sparse["tokens"][:, SHORT], found.stock["tokens"][:, SHORT])
    difference = found.sparse["logits"][:, SHORT] - found.stock["logits"][:, SHORT]
    assert float(difference.abs().max()) < 1e-4


@every_model
def test_a_longer_prompt_is_attended_to_in_part(found: Found) -> None:
    """Its prompt is computed by SGLang; its first decode step already differs."""
    assert found.sparse["rows"].tolist() == [STEPS, STEPS, 0]
    difference = (found.sparse["logits"] - found.stock["logits"])[:, LONG].abs().amax(-1)
    assert float(difference[0]) < 1e-5
    assert float(difference[1]) > 1e-2
    assert bool(found.sparse["logits"].isfinite().all())


@every_model
def test_queries_equal_float64_of_their_streams(found: Found) -> None:
    """In one operation, in another process, and module by module."""
    sparse = found.sparse
    spec = read_model_spec(found.folder, dtype="float32")
    full = set(range(spec.num_layers)) - set(spec.other_layers)
    assert set(sparse["layers"].tolist()) == full
    assert len(sparse["layers"]) == len(full) * STEPS
    Reference(found.name, found.folder).check_queries(sparse)


@every_model
def test_streams_are_those_that_the_layer_before_is_given(found: Found) -> None:
    """Of the request that attends to everything, and so has the streams of the model itself."""
    tokens = prompts()[SHORT].tolist() + found.stock["tokens"][:, SHORT].tolist()
    streams, _ = Reference(found.name, found.folder).streams(tokens)
    limit = STREAM_TOLERANCE[found.name] * float(streams.abs().max())
    sparse, length = found.sparse, LENGTHS[SHORT]
    positions = sparse["positions"][:, SHORT]
    assert set(positions.tolist()) == set(range(length, length + STEPS))
    for at, layer in enumerate(sparse["layers"].tolist()):
        # The first layer has none before it: its own stream.
        want = streams[max(0, layer - 1), positions[at]]
        assert float((sparse["streams"][at, SHORT].double() - want).abs().max()) < limit, layer


@every_model
def test_the_checkpoint_is_what_the_list_says(found: Found) -> None:
    config = read_config(found.folder)
    spec = read_model_spec(found.folder, dtype="float32")
    scale = config.get("attention_multiplier", spec.head_dim**-0.5)
    if "query_pre_attn_scalar" in config:
        scale = config["query_pre_attn_scalar"] ** -0.5
    assert spec.scale == pytest.approx(scale)
    tensors = load_file(found.folder / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_shapes(shapes, config)
    entry = ARCHITECTURES[spec.architecture]
    query = "qkv_proj" if entry.fused_qkv else "q_proj"
    for part in (f"self_attn.{query}", *filter(None, (entry.attention_norm, *entry.other_norms))):
        name = f"{entry.tensor_prefix}layers.1.{part}.weight"
        wrong = {**shapes, name: (shapes[name][0] + 1, *shapes[name][1:])}
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            check_shapes(wrong, config)
    shape = shape_of_config(config, name=found.name, dtype="float32")
    parameters = sum(tensor.numel() for tensor in tensors.values())
    # Biases, norms of queries and a router's own numbers are not counted.
    assert 0.98 * parameters < shape.weight_bytes / 4 <= parameters


@every_model
def test_logits_are_those_of_the_definition(found: Found) -> None:
    """Of the request that attends to everything: stock's and ours are compared with float64."""
    tokens = prompts()[SHORT].tolist() + found.stock["tokens"][:, SHORT].tolist()
    _, want = Reference(found.name, found.folder).streams(tokens)
    want = want[LENGTHS[SHORT] - 1 : LENGTHS[SHORT] + STEPS]
    limit = LOGIT_TOLERANCE[found.name] * float(want.abs().max())
    for logits in (found.stock["logits"], found.exact["logits"], found.sparse["logits"]):
        assert float((logits[:, SHORT].double() - want).abs().max()) < limit


@pytest.mark.parametrize("found", OTHER_PROCESS, indirect=True)
def test_a_cache_rank_in_another_process_selects_the_same(found: Found, runs: Path) -> None:
    """It predicts with mapped weights."""
    two = result(runs / f"{found.name}-two.safetensors")
    assert torch.equal(two["rows"], found.sparse["rows"])
    assert torch.equal(two["tokens"], found.sparse["tokens"])
    assert float((two["logits"] - found.sparse["logits"]).abs().max()) < 1e-5
