# SPDX-License-Identifier: Apache-2.0
"""Why ``lfps`` loses more the more it decodes: what it may attend to, at 32K.

    tandemkv quality MODEL_DIR --samples-only --tasks perplexity --context-tokens 32000 --out Q
    python tests/bench/lfps_candidates.py MODEL_DIR Q/samples/perplexity.jsonl \
        --names pepys.txt --out docs/benchmarks/lfps_candidates.json

A prompt is computed once, dense, by transformers; then its next tokens are forced through decode
with the policy's own code in each layer but 0 and 1, sink and recent tokens beside it. ``best_N``
attends to the N tokens of each KV head that have the largest weights instead. One request, float32,
CPU, Llama. Losses are changes of perplexity against dense attention in percent.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from tandemkv.cache_rank.policies.attending import AttendingPolicy, AttendInput
from tandemkv.cache_rank.policies.base import PolicyContext, SeedInput, StoredKV
from tandemkv.cache_rank.policies.registry import find_policy, resolve_selection
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec

SINK, RECENT, BUDGET, EXACT, CHUNK = 4, 64, 1984, 2, 2000
RANGES = ((0, 8), (8, 64), (64, 128), (128, 255))
OWNER = (1, 1)
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "best_1984": {"best": BUDGET},
    "best_674": {"best": 674},
    "lfps": {"options": {}},
    "lfps_a0.05": {"options": {"threshold": 0.05}},
    "lfps_r0.99": {"options": {"decay": 0.99}},
    "lfps_a0.01_r0.99_no_bypass": {"options": {"threshold": 0.01, "decay": 0.99, "sparsity": 1.0}},
    "lfps_tables_of_query_heads": {"options": {}, "by_query_head": True},
}


class Attention:
    """Attention of all layers over K and V of one request, which it keeps."""

    def __init__(self, config: Any, num_tokens: int) -> None:
        self.layers, self.group = config.num_hidden_layers, config.num_attention_heads
        self.heads = config.num_key_value_heads
        self.group //= self.heads
        self.dim = config.head_dim
        shape = (self.layers, num_tokens, self.heads, self.dim)
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)
        self.queries = torch.zeros(self.layers, CHUNK, self.heads * self.group, self.dim)
        self.begin = 0
        self.decode: Callable[[int, torch.Tensor, int], torch.Tensor] | None = None

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        *_: Any, **__: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        layer, begin, end = module.layer_idx, self.begin, self.begin + query.shape[2]
        self.k[layer, begin:end] = key[0].transpose(0, 1)
        self.v[layer, begin:end] = value[0].transpose(0, 1)
        if self.decode is not None:
            return self.decode(layer, query[0, :, 0], end)[None, None], None
        self.queries[layer, : end - begin] = query[0].transpose(0, 1)
        k, v = (
            pool[layer, :end].transpose(0, 1).repeat_interleave(self.group, 0)[None]
            for pool in (self.k, self.v)
        )
        mask = torch.arange(end) <= torch.arange(begin, end)[:, None]
        out = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=mask)
        return out.transpose(1, 2), None

    def over(
        self, layer: int, query: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output ``[QO, D]`` and log-sum-exp ``[QO]`` over positions ``[H, n]``."""
        heads = torch.arange(self.heads)[:, None]
        k, v = self.k[layer][kept, heads], self.v[layer][kept, heads]
        logits = query.view(self.heads, self.group, -1) @ k.mT / math.sqrt(self.dim)
        out = logits.softmax(-1) @ v
        return out.reshape(query.shape), logits.logsumexp(-1).reshape(-1)


def with_others(
    attention: Attention, others: Callable[[int, torch.Tensor, int], Any] | None, layer: int,
    query: torch.Tensor, end: int,
) -> torch.Tensor:  # fmt: skip
    """Attend to sink, recent tokens and what `others` attends to; without it, and early, to all."""
    if others is None or layer < EXACT:
        return attention.over(layer, query, torch.arange(end).expand(attention.heads, -1))[0]
    near = torch.cat([torch.arange(SINK), torch.arange(end - RECENT, end)])
    parts = [attention.over(layer, query, near.expand(attention.heads, -1))]
    parts.append(others(layer, query, end))
    weights = torch.stack([lse for _, lse in parts]).softmax(0)
    return sum(w[:, None] * out for w, (out, _) in zip(weights, parts, strict=True))  # type: ignore[no-any-return]


def best(attention: Attention, count: int, layer: int, query: torch.Tensor, end: int) -> Any:
    """Attend to the best `count` tokens of each KV head, by the mean weight of its group."""
    keys = attention.k[layer, SINK : end - RECENT].transpose(0, 1)
    logits = query.view(attention.heads, attention.group, -1) @ keys.mT / math.sqrt(attention.dim)
    top = logits.softmax(-1).mean(1).topk(count, -1).indices
    return attention.over(layer, query, SINK + top)


class Lfps:
    """The policy after a prompt of `length` tokens, and what it has scored and attended to."""

    def __init__(
        self, attention: Attention, length: int, *, options: dict[str, Any],
        by_query_head: bool = False,
    ) -> None:  # fmt: skip
        self._attention, self._copies = attention, attention.group if by_query_head else 1
        self.counts: list[list[int]] = []
        heads = attention.heads * self._copies
        model = ModelSpec(
            architecture="LlamaForCausalLM", num_layers=attention.layers,
            num_qo_heads=attention.heads * attention.group, num_kv_heads=heads,
            head_dim=attention.dim, hidden_size=1, max_context=attention.k.shape[1],
            dtype="float32", model_hash="",
        )  # fmt: skip
        selection = resolve_selection({
            "policy": "lfps", "budget_tokens": BUDGET, "num_sink_tokens": SINK,
            "num_recent_tokens": RECENT, "options": options,
        })  # fmt: skip
        policy = find_policy("lfps")(PolicyContext(model=model, selection=selection))
        assert isinstance(policy, AttendingPolicy)
        self._policy, self._num_heads = policy, heads
        self._slots = torch.arange(attention.k.shape[1], dtype=torch.int32)[None]
        self._pools = [self._pool_of(layer, slice(None)) for layer in range(attention.layers)]
        rows = torch.arange(length - CHUNK, length)
        for layer in range(EXACT, attention.layers):
            policy.observe_stored(
                SeedInput(
                    layer=layer, owner=OWNER, queries=attention.queries[layer], positions=rows,
                    score=lambda queries, _: queries, lo=SINK, hi=length + 1 - RECENT,
                    stored=StoredKV(*self._pools[layer], self._slots), budget=BUDGET,
                )
            )  # fmt: skip

    def _pool_of(self, layer: int, at: slice | int) -> list[torch.Tensor]:
        pools = (self._attention.k[layer, at], self._attention.v[layer, at])
        if self._copies == 1:
            return list(pools)
        return [pool.repeat_interleave(self._copies, -2) for pool in pools]

    def __call__(self, layer: int, query: torch.Tensor, end: int) -> Any:
        if self._copies > 1:
            for pool, new in zip(self._pools[layer], self._pool_of(layer, end - 1), strict=True):
                pool[end - 1] = new
        found = self._policy.attend(
            AttendInput(
                layer=layer, owners=[OWNER], query=query[None], lengths=torch.tensor([end]),
                lo=torch.tensor([SINK]), hi=torch.tensor([end - RECENT]),
                stored=StoredKV(*self._pools[layer], self._slots), budget=BUDGET,
            )
        )  # fmt: skip
        if layer == EXACT:
            self.counts.append([0, 0])
        self.counts[-1][0] += found.num_scored
        self.counts[-1][1] += found.num_attended
        return found.merged[0, :, :-1], found.merged[0, :, -1]

    def per_head(self, first: int, last: int) -> tuple[float, float]:
        """Return tokens scored, and attended to, of a head and layer in these steps."""
        some = torch.tensor(self.counts[first:last], dtype=torch.float64).mean(0)
        scored, attended = (some / self._num_heads / (self._attention.layers - EXACT)).tolist()
        return scored, attended


@torch.inference_mode()
def measure(model: Any, sample: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return negative log-likelihoods and counts of each variant after one prompt."""
    context, forced = sample["context_ids"], sample["forced_ids"]
    length, steps = len(context), len(forced) - 1
    attention = Attention(model.config, length + steps)
    AttentionInterface.register("kept", attention)
    model.set_attn_implementation("kept")

    def forward(ids: list[int]) -> torch.Tensor:
        at = torch.arange(attention.begin, attention.begin + len(ids))[None]
        given = {"position_ids": at, "use_cache": False, "logits_to_keep": 1}
        found: torch.Tensor = model(torch.tensor([ids]), **given).logits[0, -1]
        attention.begin += len(ids)
        return found

    for begin in range(0, length, CHUNK):
        forward(context[begin : begin + CHUNK])
    found = {}
    for name, variant in VARIANTS.items():
        others: Any = None
        if "best" in variant:
            others = partial(best, attention, variant["best"])
        elif variant:
            others = Lfps(attention, length, **variant)
        attention.decode = partial(with_others, attention, others)
        attention.begin, nll = length, []
        for step in range(steps):
            target = torch.tensor(forced[step + 1])
            nll.append(torch.nn.functional.cross_entropy(forward([forced[step]]), target).item())
        counts = {
            f"{first}-{last}": others.per_head(first, last)
            for first, last in RANGES
            if isinstance(others, Lfps)
        }
        found[name] = {"nll": nll, "counts": counts}
        print(sample["name"], name, sum(nll) / len(nll), counts, flush=True)
    return found


def rows_of(found: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return rows of a report: means over texts."""
    rows = []
    for name in VARIANTS:
        for first, last in ((0, 255), *RANGES):
            differences = [
                each[name]["nll"][step] - each["dense"]["nll"][step]
                for each in found
                for step in range(first, last)
            ]
            loss = 100 * (math.exp(sum(differences) / len(differences)) - 1)
            row = {"figure": f"{name}_{first}-{last}", "value": loss, "unit": "%"}
            counts = [each[name]["counts"].get(f"{first}-{last}") for each in found]
            if counts[0] is not None:
                scored, attended = torch.tensor(counts).mean(0).tolist()
                row |= {"scored": round(scored), "attended": round(attended)}
            rows.append(row)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", type=Path, help="of the task perplexity")
    parser.add_argument("--names", nargs="+", required=True, help="of samples")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    lines = [json.loads(line) for line in args.samples.read_text("utf-8").splitlines()]
    samples = {line["name"]: line for line in lines}
    found = []
    for name in args.names:
        found.append(measure(model, samples[name]))
        report = {
            "benchmark": "lfps_candidates",
            "texts": args.names[: len(found)],
            "versions": {"torch": torch.__version__},
            "rows": rows_of(found),
        }
        args.out.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
