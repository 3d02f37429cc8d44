# SPDX-License-Identifier: Apache-2.0
"""Models built unlike the embedded one: query norms, biases, scaled RoPE, sliding windows.

Weights are random, and large enough that tokens depend on what is attended to. In CI
``unit/inference_rank/test_architectures.py`` runs these models and others, without HTTP.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from exactness import compare, run
from rank_servers import model_dir, ours, stock

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

SHAPE = {
    "vocab_size": 49152, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 5,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
MODELS = {
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 48,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        },
    ),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None, "rope_parameters": LLAMA3}),
}
BOUNDED = {
    "policy": "look_ahead",
    "budget_tokens": 96,
    "resident_factor": 1.0,
    "num_recent_tokens": 16,
    "fetch_cap": 96,
    "exact_layers": [],
    "sample_tokens": 0,
}
NEW_TOKENS = 16


class Found(NamedTuple):
    """What stock SGLang, and a cache rank in another process and in SGLang's, say to prompts."""

    stock: list[dict[str, Any]]
    two_processes: list[dict[str, Any]]
    one_process: list[dict[str, Any]]


def make_model(name: str, folder: Path) -> None:
    """Save a model of five layers, with the embedded model's tokenizer."""
    kind, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **changes)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.6, 1.4).sub_(1.0 if name == "gemma3" else 0.0)
            else:
                parameter.normal_(0.0, 0.05 if "embed" in key else 0.1)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(model_dir()) / file, folder / file)


@pytest.fixture(scope="module", params=MODELS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """One prompt that fits the resident set, and two that are several times as long."""
    folder = tmp_path_factory.mktemp(request.param)
    make_model(request.param, folder)
    rng = random.Random(3)
    prompts = [[rng.randrange(10, 49000) for _ in range(n)] for n in (80, 400, 700)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEMKV_TEST_MODEL", str(folder))
        answers = []
        for server in (
            stock(),
            ours({"selection": BOUNDED}),
            ours({"cache_ranks": 0, "selection": BOUNDED}),
        ):
            with server as running:
                answers.append(run(running, prompts, new_tokens=NEW_TOKENS, at_once=1))
    return Found(*answers)


def test_what_fits_the_resident_set_gives_the_tokens_of_stock(found: Found) -> None:
    for answers in (found.two_processes, found.one_process):
        result = compare(answers[:1], found.stock[:1])
        assert result["pass"], result


def test_both_cache_ranks_select_the_same(found: Found) -> None:
    """One predicts queries with weights that it read, the other with SGLang's layers."""
    result = compare(found.one_process, found.two_processes)
    assert result["pass"], result
    assert not compare(found.two_processes[1:], found.stock[1:])["pass"], "all was attended to"
