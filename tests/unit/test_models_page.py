# SPDX-License-Identifier: Apache-2.0
"""``docs/models.md`` has the rows that the list of architectures makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandemkv.cache_rank.protocol.models.architectures import ARCHITECTURES, REFUSED, Architecture
from tandemkv.cache_rank.protocol.models.weight_formats import UNREADABLE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
GPU_REPORT = json.loads((ROOT / "docs/acceptance/architectures_gpu.json").read_text("utf-8"))
RAN_ON_GPU = (
    {
        row["architecture"]: f"beyond a limit on an {row['gpu'].split()[1]}, below"
        for row in GPU_REPORT["failures"]
    }
    | {
        row["architecture"]: f"{row.get('gpu', GPU_REPORT['gpu']).split()[1]}, random weights"
        for row in GPU_REPORT["rows"]
    }
    | {
        "LlamaForCausalLM": "H200, SmolLM2",
        "Qwen3ForCausalLM": "H200, H100: dummy weights of the 8B shape, in FP8 as well",
        "Qwen3MoeForCausalLM": "H200, dummy weights of the 30B-A3B shape",
    }
)
"""What reports under ``docs`` show: this one, quality/smollm2-4k-h200, and decode.json,
decode_fp8.json and decode_moe.json of benchmarks."""
STAND_INS = {
    "Qwen2MoeForCausalLM": "1",
    "MiniMaxM2ForCausalLM": "2",
    "Ernie4_5_MoeForCausalLM": "3",
    "GptOssForCausalLM": "4",
    "Qwen3NextForCausalLM": "1, 5",
    "Qwen3_5ForConditionalGeneration": "5, 6",
    "Qwen3_5MoeForConditionalGeneration": "1, 5, 6",
    "Qwen3_5ForCausalLM": "5, 6",
    "Qwen3_5MoeForCausalLM": "1, 5, 6",
}
"""Numbers of the page's notes on parts of SGLang that do not run on every CPU."""


def differs(entry: Architecture) -> str:
    """Return what an entry says, in words."""
    found = []
    if entry.attention_norm is None:
        found.append("attention reads the residual stream without a norm")
    if entry.query_norm == "head":
        found.append("norm of each query head")
    if entry.query_norm == "layer":
        found.append("norm over all query heads")
    if entry.rotates == "neighbours":
        found.append("RoPE turns neighbours")
    if entry.scale_field:
        found.append(f"softmax scale `{entry.scale_field}`")
    if entry.fused_qkv:
        found.append("one tensor for q, k, v")
    if entry.experts is not None:
        found.append("experts")
    if entry.mlp_matrices == 2:
        found.append("MLP without a gate")
    if entry.gates_heads:
        found.append("a gate of each query head")
    if entry.full_every:
        is_linear = entry.others == "linear_attention"
        found.append("layers of linear attention" if is_linear else "layers with a sliding window")
    if entry.decoder_config:
        found.append("reads images too, served for text")
    if entry.has_sinks:
        found.append("attention sinks")
    return "; ".join(found)


def row(entry: Architecture) -> str:
    """Return an entry's row of the table; `test_architectures` shows both of its "yes"."""
    note = f" ({STAND_INS[entry.name]})" if entry.name in STAND_INS else ""
    cells = (
        f"`{entry.name}`", entry.models, differs(entry), f"yes{note}", "yes",
        RAN_ON_GPU.get(entry.name, "no"),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_table_has_every_architecture(name: str) -> None:
    assert row(ARCHITECTURES[name]) in PAGE.splitlines()


def test_the_table_has_no_other_row() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") and "ForC" in line]
    served = [line for line in rows if line.split("`")[1] in ARCHITECTURES]
    assert len(served) == len(ARCHITECTURES)
    refused = {line.split("`")[1] for line in rows} - set(ARCHITECTURES)
    assert refused <= set(REFUSED)


@pytest.mark.parametrize("reason", sorted(set(REFUSED.values())))
def test_every_reason_is_named_with_its_architectures(reason: str) -> None:
    names = [f"`{name}`" for name in REFUSED if REFUSED[name] == reason]
    assert f"| {', '.join(names)} | {reason} |" in PAGE.splitlines()


def test_the_page_is_linked() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(docs/models.md)" in readme


def test_formats_that_are_refused_have_their_reasons() -> None:
    part = PAGE.partition("\n## Quantised weights\n")[2]
    found = [line for line in part.splitlines() if line.startswith("| `") and line.count("|") == 3]
    rows = [f"| `{method}` | {reason} |" for method, reason in UNREADABLE.items()]
    assert found == ["| `quant_method` | reason |", *rows]
