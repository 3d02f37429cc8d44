# SPDX-License-Identifier: Apache-2.0
"""What is decided before a server starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandemkv.server.quality import campaign
from tandemkv.server.quality.campaign import Request, prepare
from tandemkv.server.quality.corpus import Corpus

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 16,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cuda", [], 0),
        ("cuda", ["selection.dense_tokens=640"], 640),
        ("cpu", [], None),
    ],
)
def test_serve_leaves_no_prompt_dense_on_a_gpu(
    device: str,
    given: list[str],
    expected: int | None,
    tmp_path: Path,
    corpus: Corpus,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `serve` fills in for an open `dense_tokens` would be dense measured against dense."""
    monkeypatch.setattr(campaign, "resolve_device", lambda device: device)
    monkeypatch.setattr(campaign, "load_tokenizer", lambda folder: tokenizer)
    model, text = tmp_path / "model", tmp_path / "text.txt"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    text.write_text(next(iter(corpus.texts.values())))
    request = Request(
        model=str(model),
        policies=["look_ahead"],
        budgets=["160"],
        tasks=["niah_single"],
        out=tmp_path / "out",
        num_samples=1,
        context_tokens=700,
        corpus=[text],
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        settings=["selection.num_recent_tokens=16", *given],
    )
    found = prepare(request, lambda text: None)
    (sparse,) = (c for c in found.configurations if not c.is_dense)
    assert found.settings_of(sparse).selection.dense_tokens == expected
