# SPDX-License-Identifier: Apache-2.0
"""What the decode benchmark puts in the place of trained weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_loader import loader

from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.inference_rank import decode_bench


def test_norms_and_embeddings_of_dummy_models_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for whoever copies them before the model is run."""
    monkeypatch.setattr(loader, "initialize_dummy_weights", loader.initialize_dummy_weights)
    model = torch.nn.ModuleDict(
        {
            "q_norm": torch.nn.RMSNorm(8),
            "input_layernorm": torch.nn.RMSNorm(8),
            "q_proj": torch.nn.Linear(8, 8),
            "embed_tokens": torch.nn.Embedding(512, 8),
        }
    )
    loader.initialize_dummy_weights(model)
    with pytest.raises(RuntimeError, match=r"q_norm\.weight is as SGLang made it"):
        decode_bench.require_filled(model)
    torch.nn.init.ones_(model["q_norm"].weight)
    torch.nn.init.ones_(model["input_layernorm"].weight)
    with pytest.raises(RuntimeError, match=r"embed_tokens\.weight is as SGLang made it"):
        decode_bench.require_filled(model)
    decode_bench.fill_dummies()
    loader.initialize_dummy_weights(model)
    for name in ("q_norm", "input_layernorm"):
        assert torch.equal(model[name].weight, torch.ones(8))
    decode_bench.require_filled(model)
    embedding = model["embed_tokens"].weight.detach().clone()
    assert float(embedding.std()) == pytest.approx(1.0, abs=0.1)
    loader.initialize_dummy_weights(model)
    assert torch.equal(model["embed_tokens"].weight, embedding)  # on every rank and run
    assert 0 < float(model["q_proj"].weight.abs().max()) <= 1e-3


@pytest.mark.parametrize(
    ("link", "tp_size", "engine", "names"),
    [
        (None, 1, None, ["model on cuda:0 H0"]),
        (None, 2, None, ["model on cuda:0 H0", "model on cuda:1 H1"]),
        ("local", 1, "cuda:0", ["model on cuda:0 H0", "engine on cuda:0 H0"]),
        (
            *("shared", 1, "cuda:1"),
            ["model on cuda:0 H0", *(f"engine on cuda:{n} H{n}" for n in (1, 2, 3))],
        ),
        ("message", 1, "cuda:0", ["model on cuda:0 H0"]),
    ],
)
def test_each_figure_says_which_gpus_worked(
    link: Any, tp_size: int, engine: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = SimpleNamespace(parts=[None] * (len(names) - 1))
    settings = SimpleNamespace(placement=Placement(link=link or "shared", model_device="cuda"))
    runtime = SimpleNamespace(client=client, settings=settings) if link else None
    monkeypatch.setattr(decode_bench.runtime_module, "current", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"H{index}")
    more: dict[str, Any] = {} if engine is None else {"cache_device": torch.device(engine)}
    runner = SimpleNamespace(
        server_args=SimpleNamespace(tp_size=tp_size), attn_backend=SimpleNamespace(**more)
    )
    assert decode_bench.device_names(runner) == names
    # Those that trace steps of their own.
    assert decode_bench.num_cache_ranks() == (len(names) - 1 if link == "shared" else 0)


@pytest.mark.parametrize(
    ("done", "limit_s", "said"),
    [(False, 9.0, "waited for a layer in vain"), (True, 0.0, "0 s have passed")],
)
def test_prompts_that_do_not_come_are_told_of(
    done: bool, limit_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = torch.zeros((5, 32), dtype=torch.int32)
    words[1:3] = 7  # layers 0 and 1 are ready
    words[3, 0] = 7  # layer 2 as far as one of two cache ranks goes
    gpu = SimpleNamespace(here=torch.device("cuda"))

    class Mapped(dict[str, torch.Tensor]):
        homes = gpu

    tensors = Mapped(to_engine=torch.zeros((10, 32), dtype=torch.int32), to_inference=words)
    parts = [SimpleNamespace(tensors=tensors)] * 2  # which have their flags side by side
    client = SimpleNamespace(parts=parts, step=7, lost_reason=None)
    monkeypatch.setattr(
        decode_bench.runtime_module, "current", lambda: SimpleNamespace(client=client)
    )
    monkeypatch.setattr(decode_bench, "_PROMPTS_S", limit_s)
    link = SimpleNamespace(is_done=lambda step: done and step == 7)
    runner = SimpleNamespace(
        model_config=SimpleNamespace(num_hidden_layers=4), attn_backend=SimpleNamespace(link=link)
    )
    with pytest.raises(RuntimeError, match=rf"step 7, 2 of 4 layers are ready: .*{said}"):
        decode_bench.await_prompts(runner)
    words[0, 0] = 7
    with pytest.raises(RuntimeError, match=said):
        decode_bench.await_prompts(runner)
    words[0] = 7
    decode_bench.await_prompts(runner)
