# SPDX-License-Identifier: Apache-2.0
"""Which part of a key tells most of scores, by what choosing with it misses: decision record 35.

    python tests/bench/index_channels.py MODEL_DIR --out docs/benchmarks/index_channels.json TEXT...

Moments of queries and keys are taken over Python's language reference, as ``tandemkv calibrate
--index-channels`` takes them. Then for some of the last tokens of each TEXT the best K tokens of
each KV head are chosen from keys of which an int4 index keeps a part. Counted is the attention
that sink, recent and chosen tokens leave out, over all layers, as a multiple of what it is with
all channels in float32. One request, float32, Llama.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec
from tandemkv.server.evaluation.calibrate.index_channels import ChannelMeasurement, keep
from tandemkv.server.evaluation.corpus import language_reference
from tandemkv.server.evaluation.tokenizing import load_tokenizer

SINK, RECENT, BUDGET, PAGE, ASKED = 4, 128, 384, 128, range(512, 0, -16)
Maps = tuple[torch.Tensor, torch.Tensor]
"""Of queries and of keys, ``[H, D, R]`` each, float64."""
SHORT_TOKENS = 1024


def channels(products: torch.Tensor, best: Callable[[torch.Tensor], torch.Tensor]) -> Maps:
    """Return maps that keep the channels ``[H, R]`` that `best` finds."""
    kept = torch.nn.functional.one_hot(best(products), products.shape[-1]).double().mT
    return kept, kept


def combinations(queries: torch.Tensor, keys: torch.Tensor, count: int) -> Maps:
    """Return the truncated SVD of what scores vary in, for independent queries and keys."""
    (own, own_inverse), (other, other_inverse) = _roots(queries), _roots(keys)
    left, values, right = torch.linalg.svd(own @ other)
    scale = torch.diag_embed(values[:, :count].sqrt())
    return own_inverse @ left[..., :count] @ scale, other_inverse @ right.mT[..., :count] @ scale


def principal(keys: torch.Tensor, count: int) -> Maps:
    """Return the principal components of keys."""
    found = torch.linalg.eigh(keys)[1][..., -count:]
    return found, found


def _roots(moments: torch.Tensor) -> Maps:
    values, vectors = torch.linalg.eigh(moments)
    root = values.clamp_min(1e-9 * float(values.max())).sqrt()
    return (vectors * root[:, None]) @ vectors.mT, (vectors / root[:, None]) @ vectors.mT


def all_maps(
    measurement: ChannelMeasurement, short: ChannelMeasurement, layer: int, count: int
) -> dict[str, Maps]:
    """Return what is compared, by name; `short` has read as many tokens in short texts."""
    queries, keys = measurement.queries[layer], measurement.keys[layer]
    products, every = queries * keys, torch.eye(keys.shape[-1]).double().expand_as(keys)
    generator = torch.Generator().manual_seed(layer)
    chance = torch.rand(keys.shape[:2], generator=generator)
    return {
        "all": (every, every),
        "dropped one after another": channels(products, lambda x: keep(x, count).channels),
        "likewise, of short texts": channels(
            short.products(layer), lambda x: keep(x, count).channels
        ),
        "largest product": channels(
            products, lambda x: x.diagonal(dim1=1, dim2=2).topk(count).indices
        ),
        "truncated SVD": combinations(queries, keys, count),
        "principal components": principal(keys, count),
        "chance": channels(products, lambda _: chance.topk(count).indices),
    }


def in_int4(keys: torch.Tensor) -> torch.Tensor:
    """Return keys ``[H, N, R]`` as an int4 index has them; those of a page not yet full stay."""
    full = keys.shape[1] // PAGE * PAGE
    pages = keys[:, :full].unflatten(1, (-1, PAGE))
    zero = pages.amin(2, keepdim=True)
    scale = ((pages.amax(2, keepdim=True) - zero) / 15).clamp_min(1e-8)
    coded = ((pages - zero) / scale).round() * scale + zero
    return torch.cat([coded.flatten(1, 2), keys[:, full:]], 1)


class Missed:
    """Attention that is left out, by name of what chose, summed over layers and tokens."""

    def __init__(self, maps: dict[int, dict[str, Maps]]) -> None:
        self._maps = maps
        self.sums: dict[str, float] = defaultdict(float)

    def add(self, layer: int, query: torch.Tensor, key: torch.Tensor, scale: float) -> None:
        """Look at a text's last queries ``[Hq, T, D]`` against all keys ``[H, T, D]``."""
        last = torch.tensor([query.shape[1] - back for back in ASKED])
        own = query[:, last].unflatten(0, (len(key), -1)).double()
        at, keys = torch.arange(key.shape[1]), key.double()
        is_later = at > last[:, None]
        weights = (own @ keys[:, None].mT * scale).masked_fill(is_later, -torch.inf).softmax(-1)
        is_given = (at < SINK) | (at > last[:, None] - RECENT)
        centred = keys - keys.mean(1, keepdim=True)
        for name, (of_queries, of_keys) in {"": (None, None), **self._maps[layer]}.items():
            if of_queries is None:
                scores = own @ keys[:, None].mT
            else:
                scores = (own @ of_queries[:, None]) @ in_int4(centred @ of_keys)[:, None].mT
            scores = (scores * scale).masked_fill(is_later | is_given, -torch.inf)
            chosen = scores.softmax(-1).mean(1).topk(BUDGET).indices
            got = weights.masked_fill(is_given, 0.0).gather(
                3, chosen[:, None].expand(-1, own.shape[1], -1, -1)
            )
            given = weights.masked_fill(~is_given, 0.0).sum(-1)
            self.sums[name] += float((1 - given - got.sum(-1)).mean())


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    spec, tokenizer = read_model_spec(args.model, dtype="float32"), load_tokenizer(args.model)
    measurement, short = (ChannelMeasurement(args.model, spec, dtype="float32") for _ in "ab")
    reference = tokenizer.encode(language_reference(), add_special_tokens=False)
    for start in (0, 40_000):
        measurement.add(reference[start : start + args.tokens])
        for first in range(start, start + args.tokens, SHORT_TOKENS):
            short.add(reference[first : first + SHORT_TOKENS])
    layers = range(spec.num_layers)
    missed = Missed({x: all_maps(measurement, short, x, args.channels) for x in layers})

    def look(layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        missed.add(layer, query, key, spec.scale)

    measurement.take_in = look  # no longer adds up
    for path in args.texts:
        text = path.read_text(encoding="utf-8", errors="ignore")
        tokens = tokenizer.encode(text, add_special_tokens=False)[: args.tokens]
        measurement.add(tokens)
    report: dict[str, Any] = {
        "benchmark": "index_channels",
        "model": args.model.name,
        "channels": [args.channels, spec.head_dim],
        "tokens": args.tokens,
        "texts": [path.name for path in args.texts],
        "chosen": BUDGET,
        "times_missed": {
            name: round(total / missed.sums[""], 3) for name, total in missed.sums.items() if name
        },
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report["times_missed"], indent=1))


if __name__ == "__main__":
    main()
