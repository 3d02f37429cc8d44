# SPDX-License-Identifier: Apache-2.0
"""A small random model with four KV heads, whose tokens depend on what is attended to."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers
from rank_servers import model_dir
from workbench import long_ids

SHAPE = {
    "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip

DEEP = {
    "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 12,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
}  # fmt: skip
"""What a model has in which steps take longer, with as many heads and positions as the embedded."""


def make_random_model(folder: Path, **shape: int) -> None:
    """Write it into `folder`, of `SHAPE` or another, with the tokenizer of the embedded model."""
    long_ids()  # of that tokenizer
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(model_dir()) / file, folder / file)
    torch.manual_seed(0)
    net = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE | shape))
    with torch.no_grad():
        for key, parameter in net.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.6, 1.4)
            else:
                parameter.normal_(0.0, 0.05 if "embed" in key else 0.15)
    net.save_pretrained(folder)
