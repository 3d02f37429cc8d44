# SPDX-License-Identifier: Apache-2.0
"""What the decode benchmark puts in the place of trained weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_loader import loader

from tandemkv.inference_rank import decode_bench


def test_norms_of_dummy_models_have_weight_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for whoever copies them before the model is run."""
    monkeypatch.setattr(loader, "initialize_dummy_weights", loader.initialize_dummy_weights)
    model = torch.nn.ModuleDict(
        {
            "q_norm": torch.nn.RMSNorm(8),
            "input_layernorm": torch.nn.RMSNorm(8),
            "q_proj": torch.nn.Linear(8, 8),
        }
    )
    loader.initialize_dummy_weights(model)
    with pytest.raises(RuntimeError, match=r"q_norm\.weight is not one"):
        decode_bench.require_norms(model)
    decode_bench.fill_norms()
    loader.initialize_dummy_weights(model)
    for name in ("q_norm", "input_layernorm"):
        assert torch.equal(model[name].weight, torch.ones(8))
    decode_bench.require_norms(model)
    assert 0 < float(model["q_proj"].weight.abs().max()) <= 1e-3


@pytest.mark.parametrize(
    ("tp_size", "engine", "names"),
    [
        (1, None, ["model on cuda:0 H0"]),
        (2, None, ["model on cuda:0 H0", "model on cuda:1 H1"]),
        (1, "cuda:0", ["model on cuda:0 H0", "engine on cuda:0 H0"]),
        (1, "cuda:1", ["model on cuda:0 H0", "engine on cuda:1 H1"]),
    ],
)
def test_each_figure_says_which_gpus_worked(
    tp_size: int, engine: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"H{index}")
    more: dict[str, Any] = {} if engine is None else {"cache_device": torch.device(engine)}
    runner = SimpleNamespace(
        server_args=SimpleNamespace(tp_size=tp_size), attn_backend=SimpleNamespace(**more)
    )
    assert decode_bench.device_names(runner) == names
