# SPDX-License-Identifier: Apache-2.0
"""What the decode benchmark puts in the place of trained weights."""

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
