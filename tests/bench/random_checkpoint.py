# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint of random weights in a known model's shape, for servers under load.

    python tests/bench/random_checkpoint.py --shape qwen3-8b --out /dev/shm/qwen3-8b

SGLang's dummy weights are a thousandth, norms included, so that all keys of a prompt score the
same but for rounding, which no model's do. Here norms are one, and all else is normal, 0.02. A
tokenizer is not written: copy one beside it, any will do for prompts of token ids.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tandemkv.server.evaluation.bench.decode import write_model_config
from tandemkv.server.plan.shape import BUILT_IN_CONFIGS

_SHARD_BYTES = 2 << 30
_SHAPES = [x for x, config in BUILT_IN_CONFIGS.items() if "quantization_config" not in config]


def write(out: Path, shape: str, max_context: int, device: str) -> int:
    """Write config and shards; returns the bytes of all weights."""
    write_model_config(BUILT_IN_CONFIGS[shape], out, max_context=max_context)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out))
    kept = {name: p.shape for name, p in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del kept["lm_head.weight"]
    generator = torch.Generator(device).manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(set(files.values())):05d}.safetensors"
        save_file(shard, out / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    for name, size in kept.items():
        if name.endswith("norm.weight"):
            weight = torch.ones(size, **options)
        else:
            weight = torch.empty(size, **options).normal_(std=0.02, generator=generator)
        shard[name] = weight.cpu()
        total += weight.nbytes
        if sum(t.nbytes for t in shard.values()) > _SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen3-8b", choices=_SHAPES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-context", type=int, default=131072)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total = write(args.out, args.shape, args.max_context, device)
    print(f"{total / 1e9:.1f} GB in {args.out}")


if __name__ == "__main__":
    main()
