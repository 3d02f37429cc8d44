# SPDX-License-Identifier: Apache-2.0
"""What leaving tokens out does to answers, simulated with transformers: decision record 15.

    tandemkv quality smollm2 --samples-only --tasks niah_single+late --samples 300 --out DIR
    python tests/bench/truncation.py late MODEL_DIR DIR/samples/niah_single_late.jsonl \
        --names 177,183 --modes dense,own,own+rest,predicted,predicted+sample128
    python tests/bench/truncation.py perplexity MODEL_DIR DIR/samples/perplexity.jsonl --tokens 100

Prefill is dense, each later token is decoded by itself: per KV head sink, recent and the best K
tokens, as `look_ahead` and `oracle` have them with c = 1. One request, float32, Llama.

| mode | chosen by |
|---|---|
| ``dense`` | nothing is left out |
| ``own`` | the step's own query (`oracle`) |
| ``predicted`` | the query predicted from the residual stream one layer earlier (`look_ahead`) |
| ``before`` | the query of the step before, each token with the score of the one before it, too |

``+rest`` counts what is left out: its softmax mass, by the query that chose, goes to the mean value
of all tokens, instead of to the chosen ones. ``+sampleN`` attends to N evenly spaced candidates
instead of as many of the K; those that are not chosen anyway stand for all that is left out, each
with as many times its weight. With ``--late N`` the first N layers of a step, which have no layer
before them to hide their selection behind, attend to what the query of the step before chooses.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

TILE = 64  # tokens that share a largest share
_MODE = re.compile(r"dense|(own|predicted|before)(\+rest|\+sample[1-9]\d*)?")


class Decoding:
    """The attention of decode steps in one mode; registered with transformers under ``sim``."""

    def __init__(
        self, budget: int, sink: int, recent: int, index: str = "native", num_exact: int = 2,
        num_late: int = 0, page: int = 64,
    ) -> None:  # fmt: skip
        self.budget, self.sink, self.recent, self.index = budget, sink, recent, index
        self.num_exact, self.num_late, self.page = num_exact, num_late, page
        self.mode = "dense"
        self.hidden: dict[int, torch.Tensor] = {}
        self.rope: tuple[torch.Tensor, torch.Tensor] | None = None
        self.layers: Any = None
        self._before: dict[int, torch.Tensor] = {}
        self._queries: dict[int, torch.Tensor] = {}

    def begin(self, mode: str) -> None:
        """Start a request."""
        self.mode = mode
        self._before.clear()
        self._queries.clear()

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any,
        scaling: float, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Attend as transformers asks for it; q ``[1, Hq, n, D]``, k and v ``[1, Hkv, N, D]``."""
        del mask
        kind, _, rest = self.mode.partition("+")
        group = q.shape[1] // k.shape[1]
        if q.shape[2] > 1 or kind == "dense" or module.layer_idx < self.num_exact:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scaling)
            return out.transpose(1, 2).contiguous(), None
        query = q[0, :, 0].view(k.shape[1], group, -1)
        logits = torch.einsum("hgd,hnd->hgn", query, k[0]) * scaling
        chooses = logits
        is_late = module.layer_idx < self.num_late
        if kind == "predicted" or is_late or self.index != "native":
            if is_late:
                asks = self._queries.get(module.layer_idx, query)
                self._queries[module.layer_idx] = query
            else:
                asks = self._predict(module, query) if kind == "predicted" else query
            keys = k[0] if self.index == "native" else in_int4(k[0], self.page)
            chooses = torch.einsum("hgd,hnd->hgn", asks, keys) * scaling
        is_candidate = torch.zeros(k.shape[2], dtype=torch.bool)
        is_candidate[self.sink : k.shape[2] - self.recent] = True
        chooses = chooses.masked_fill(~is_candidate, -math.inf)
        shares = coded_softmax(chooses) if self.index == "codes" else chooses.softmax(-1)
        scores = shares.mean(1)
        if kind == "before":
            scores = self._of_step_before(module.layer_idx, scores)
        num_samples = int(rest.removeprefix("sample") if rest.startswith("sample") else 0)
        budget = self.budget - num_samples
        best = scores.masked_fill(~is_candidate, -1.0).topk(budget, dim=-1).indices
        keep = (~is_candidate).expand(len(scores), -1).scatter(1, best, True)[:, None]
        kept = logits.masked_fill(~keep, -math.inf)
        if num_samples:
            is_sample = self._sample(num_samples, k.shape[2]) & ~keep
            times = (is_candidate.sum() - budget) / is_sample.sum(-1, keepdim=True).clamp(min=1)
            kept = torch.where(is_sample, logits + times.log(), kept)
        out = torch.einsum("hgn,hnd->hgd", kept.softmax(-1), v[0])
        if rest == "rest":
            left_out = chooses.masked_fill(keep, -math.inf).logsumexp(-1)
            share = torch.sigmoid(kept.logsumexp(-1) - left_out)[..., None]
            out = share * out + (1 - share) * v[0].mean(1)[:, None]
        return out.reshape(1, 1, q.shape[1], -1), None

    def _sample(self, count: int, length: int) -> torch.Tensor:
        first, last = self.sink, length - self.recent
        at = first + ((torch.arange(count) + 0.5) * (last - first) / count).long()
        return torch.zeros(length, dtype=torch.bool).index_fill(0, at, True)

    def _of_step_before(self, layer: int, scores: torch.Tensor) -> torch.Tensor:
        before = self._before.get(layer, scores)
        self._before[layer] = scores
        before = F.pad(before, (0, scores.shape[-1] - before.shape[-1]))
        return torch.maximum(before, F.pad(before, (1, 0))[:, :-1])

    def _predict(self, module: Any, like: torch.Tensor) -> torch.Tensor:
        assert self.rope is not None
        layer = self.layers[module.layer_idx]
        hidden = layer.input_layernorm(self.hidden[max(0, module.layer_idx - 1)])
        query = module.q_proj(hidden).view(-1, like.shape[-1])
        cos, sin = (part.view(-1) for part in self.rope)
        half = query.shape[-1] // 2
        turned = torch.cat([-query[:, half:], query[:, :half]], -1)
        return (query * cos + turned * sin).view_as(like)


def in_int4(keys: torch.Tensor, page: int) -> torch.Tensor:
    """Return keys ``[H, N, D]`` as an int4 index has them; those of a page not yet full stay."""
    full = keys.shape[1] // page * page
    pages = keys[:, :full].unflatten(1, (-1, page))
    zero = pages.amin(2, keepdim=True)
    scale = (pages.amax(2, keepdim=True) - zero) / 15
    scale, zero = scale.half().float(), zero.half().float()
    codes = ((pages - zero) / scale.clamp(min=1e-12)).round().clamp(0, 15)
    return torch.cat([(codes * scale + zero).flatten(1, 2), keys[:, full:]], 1)


def coded_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the last dimension, from a byte of each share of a tile's largest."""
    length = logits.shape[-1]
    tiles = F.pad(logits, (0, -length % TILE), value=-math.inf).unflatten(-1, (-1, TILE))
    top = tiles.amax(-1, keepdim=True).clamp(min=-1e30)
    bits = (tiles - top).exp().half().view(torch.int16)
    shares = ((bits + 64) >> 7 << 7).view(torch.float16).float()
    found = shares * (top - logits.logsumexp(-1)[..., None, None]).exp()
    return found.flatten(-2)[..., :length]


def load(directory: str, decoding: Decoding) -> Any:
    """Load a model whose decode steps attend by `decoding`."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("sim", decoding.attend)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sim"
    ).eval()
    decoding.layers = model.model.layers

    def note(index: int) -> Any:
        def hook(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            decoding.hidden[index] = positional[0] if positional else named["hidden_states"]
            decoding.rope = named["position_embeddings"]

        return hook

    for index, layer in enumerate(decoding.layers):
        layer.register_forward_pre_hook(note(index), with_kwargs=True)
    return model


def step(model: Any, cache: Any, token: int) -> torch.Tensor:
    """Decode one token; return its logits."""
    out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
    logits: torch.Tensor = out.logits[0, -1]
    return logits


def answers(model: Any, cache: Any, sample: dict[str, Any], decode: Any) -> dict[str, Any]:
    """Decode the question, then the answer."""
    for token in sample["question_ids"]:
        logits = step(model, cache, token)
    found = [int(logits.argmax())]
    while len(found) < sample["num_new_tokens"]:
        found.append(int(step(model, cache, found[-1]).argmax()))
    text = decode(found)
    return {"is_right": all(answer in text for answer in sample["answers"]), "text": text}


def likelihood(model: Any, cache: Any, sample: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Force tokens; return the mean negative log-likelihood of all but the first."""
    forced, total = sample["forced_ids"][: num_tokens + 1], 0.0
    for token, following in itertools.pairwise(forced):
        total -= float(step(model, cache, token).double().log_softmax(-1)[following])
    return {"nll": total / (len(forced) - 1)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=("late", "perplexity"))
    parser.add_argument("model", help="model directory")
    parser.add_argument("samples", type=Path, help="samples/<task>.jsonl of `tandemkv quality`")
    parser.add_argument("--names", default="0,1,2,3", help="which of them, by number")
    parser.add_argument("--modes", default="dense,own,own+rest,predicted,predicted+rest,before")
    parser.add_argument("--tokens", type=int, default=100, help="perplexity: forced tokens a text")
    parser.add_argument("--budget", type=int, default=444, help="K")
    parser.add_argument("--sink", type=int, default=4)
    parser.add_argument("--recent", type=int, default=64)
    parser.add_argument("--index", default="native", choices=("native", "int4", "codes"))
    parser.add_argument("--page", type=int, default=64, help="tokens that share int4 scales")
    parser.add_argument("--exact", type=int, default=2, help="so many first layers stay dense")
    parser.add_argument("--late", type=int, default=0, help="so many first layers select late")
    parser.add_argument("--out", type=Path, help="JSON lines, written as they come")
    args = parser.parse_args()
    for mode in args.modes.split(","):
        if not _MODE.fullmatch(mode):
            parser.error(f"--modes {mode}: there is no such mode, see above")
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(args.model).decode
    decoding = Decoding(
        args.budget, args.sink, args.recent, args.index, args.exact, args.late, args.page
    )  # fmt: skip
    model = load(args.model, decoding)
    rows = [json.loads(line) for line in args.samples.read_text(encoding="utf-8").splitlines()]
    with torch.no_grad():
        for name in args.names.split(","):
            sample = rows[int(name)]
            decoding.begin("dense")
            ids = torch.tensor([sample["context_ids"]])
            cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
            for mode in args.modes.split(","):
                decoding.begin(mode)
                own = copy.deepcopy(cache)
                found = (
                    answers(model, own, sample, decode)
                    if args.task == "late"
                    else likelihood(model, own, sample, args.tokens)
                )
                setting = {"index": args.index, "budget": args.budget, "exact": args.exact}
                if args.late:
                    setting["late"] = args.late
                if args.task == "perplexity":
                    setting["tokens"] = args.tokens
                line = json.dumps({"sample": name, "mode": mode, **setting, **found})
                print(line, flush=True)
                if args.out:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main()
