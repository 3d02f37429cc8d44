# SPDX-License-Identifier: Apache-2.0
"""A model with linear attention over HTTP: chunked prompts, and prefixes from SGLang's radix tree.

The recurrent states are SGLang's, with kernels in torch that stand in for those of a GPU.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exactness import compare, run
from rank_servers import Server, model_dir, ours, stock
from tiny_models import write_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
NEW_TOKENS = 16
CHUNK = 256
BOUNDED = {
    "policy": "look_ahead", "budget_tokens": 96, "resident_factor": 1.0, "num_recent_tokens": 16,
    "fetch_cap": 96, "exact_layers": [], "sample_tokens": 0,
}  # fmt: skip


DECODER: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
    "full_attention_interval": 2,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 96,
    "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip
MROPE = {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1], "mrope_interleaved": True,
}  # fmt: skip


def network_of(name: str) -> Any:
    """Return a network of transformers' with random weights; `DECODER` is in its configuration."""
    if name == "Qwen3_5MoeForConditionalGeneration":
        text = DECODER | {"rope_parameters": MROPE}
        config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=VISION)
        config.text_config.full_attention_interval = 2
    elif name == "Qwen3_5MoeForCausalLM":
        config = transformers.Qwen3_5MoeTextConfig(**DECODER, rope_parameters=MROPE)
        config.full_attention_interval = 2
    else:
        config = transformers.Qwen3NextConfig(**DECODER)
    return getattr(transformers, name)(config)


@pytest.fixture(
    params=[
        "Qwen3NextForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM",
    ]
)  # fmt: skip
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five layers, two of which have K and V, with the embedded model's tokenizer."""
    torch.manual_seed(0)
    network = network_of(request.param)
    with torch.no_grad():
        for key, parameter in network.named_parameters():
            if "norm" in key:
                parameter.uniform_(-0.4, 0.4).add_(1.0 if "linear_attn" in key else 0.0)
            elif key.endswith("A_log"):
                parameter.uniform_(-5.0, 0.0)
            else:
                parameter.normal_(0.0, 0.05 if "embed" in key else 0.1)
    folder = tmp_path / "model"
    network.save_pretrained(folder)
    write_tokenizer(folder, Path(model_dir()))
    monkeypatch.setenv("TANDEMKV_TEST_MODEL", str(folder))
    paths = (HERE / "stand_ins", HERE.parent / "unit/inference_rank", os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(path) for path in paths if path))
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    return folder


def talk(server: Server) -> list[dict[str, Any]]:
    """Three prompts, of which two take several chunks, and what follows on two of them."""
    draw = random.Random(3)

    def words(count: int) -> list[int]:
        return [draw.randrange(10, 49000) for _ in range(count)]

    prompts = [words(n) for n in (80, 400, 700)]
    found = run(server, prompts, new_tokens=NEW_TOKENS, at_once=3)
    turns = [
        [*prompt, *answer["ids"], *words(60)]
        for prompt, answer in zip(prompts[1:], found[1:], strict=True)
    ]
    return found + run(server, turns, new_tokens=NEW_TOKENS, at_once=1)


def test_chunks_and_prefixes_give_the_tokens_of_stock(model: Path) -> None:
    assert model.is_dir()
    with stock("--chunked-prefill-size", str(CHUNK), "--max-mamba-cache-size", "18") as server:
        wanted = talk(server)
    sizes: dict[str, Any] = {"chunked_prefill_size": CHUNK, "max_running_requests": 6}
    with ours({**sizes, "cache_ranks": 0, "selection": {"policy": "exact"}}) as server:
        exact = talk(server)
    result = compare(exact, wanted)
    assert result["pass"], result
    assert [answer["cached"] for answer in exact] == [answer["cached"] for answer in wanted]
    assert min(answer["cached"] for answer in exact[3:]) >= 400
    with ours({**sizes, "selection": BOUNDED}) as server:  # in one process, if nothing is said
        sparse = talk(server)
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        code, refused = server.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}
        )
        inference, cache_rank = server.values()
    assert cache_rank == {}
    assert code == 400
    assert "this server serves its model for text" in str(refused)
    assert inference["sparse_rows_total"] > 0
    short = compare(sparse[:1], wanted[:1])
    assert short["pass"], short
    assert not compare(sparse[1:], wanted[1:])["pass"], "all was attended to"
