# SPDX-License-Identifier: Apache-2.0
"""The methods of kvpress on the same prompts, with the same scorers, into the same report.

    python -m tandemkv.server quality MODEL --tasks ... --out DIR       # writes samples and dense
    PYTHONPATH=.ns KVPRESS_VENV/bin/python tests/bench/kvpress_peer.py MODEL --out DIR
    python -m tandemkv.server quality --report-only --out DIR

kvpress (https://github.com/NVIDIA/kvpress) wants an older transformers than SGLang: it needs a
virtual environment of its own, with kvpress, msgspec and pydantic; ``.ns`` is the folder of links
that ``make types`` makes. Measured are the presses themselves, in transformers, on CPU or GPU.

What is alike: model, token ids of the prompts, tokens kept of them per KV head and layer, greedy
decoding, scorers. What is not: a press compresses once, after prefill, and what it drops is gone;
tokens decoded later are all kept. Where the question is part of the prompt the press sees it,
where it comes late (``+late``) it does not; the first token of an answer that follows a prefill
is dense's in both systems. Prompts are prefilled one by one, without padding; what is kept of
several (``--batch``) then decodes together, each request and layer with its own mask, so that
layers may keep different numbers. PyramidKV gets window_size=8, the paper's: with kvpress's
default of 64 it falls back to SnapKV at small budgets.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from tandemkv.server.evaluation.quality.configurations import Budget, Configuration, parse_budgets
from tandemkv.server.evaluation.quality.results import (
    Answer,
    TaskResult,
    read_result,
    read_runs,
    write_configuration,
    write_result,
)
from tandemkv.server.evaluation.quality.samples import Sample, digest, read_samples, samples_digest
from tandemkv.server.evaluation.quality.scorers import SCORERS

UNCOMPRESSED = "uncompressed"
PRESSES = (
    UNCOMPRESSED,
    *("SnapKV", "PyramidKV", "StreamingLLM", "TOVA", "Knorm", "ExpectedAttention"),
)
_CLASSES = {name: f"{name}Press" for name in PRESSES if name != UNCOMPRESSED}
_ARGUMENTS: dict[str, dict[str, int]] = {"PyramidKV": {"window_size": 8}}


class Peer:
    """A model in transformers, compressed by one press after each prefill.

    Parameters
    ----------
    model, tokenizer
        Of transformers.
    press : str
        One of `PRESSES`.
    num_kept : int
        Tokens kept of a prompt, per KV head, in layers that are not exact.
    exact_layers : list of int
        Layers that keep everything.
    """

    def __init__(
        self, model: Any, tokenizer: Any, press: str, num_kept: int, exact_layers: list[int]
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._press = press
        self._num_kept = num_kept
        self._exact = set(exact_layers)
        self._counted = [i for i in range(model.config.num_hidden_layers) if i not in self._exact]
        self._attended = self._context = 0

    @property
    def attended_share(self) -> float | None:
        """Share of the context attended to while decoding, in layers that are not exact."""
        return self._attended / self._context if self._context else None

    def ask(self, samples: list[Sample], dense: dict[str, list[int]]) -> list[Answer]:
        """Answer samples of one mode, as `quality.measure` has a server do."""
        if samples[0].mode == "follow_up":
            # What a press has dropped in the first turn is gone: the question finds what it kept.
            samples = [msgspec.structs.replace(s, late_question=True) for s in samples]
        caches, firsts = zip(*(self._prefill(s.prompt_ids) for s in samples), strict=True)
        batch = Batch(list(caches), torch.stack(firsts), [len(s.prompt_ids) for s in samples])
        if samples[0].mode in ("generate", "follow_up"):
            texts = self._greedy(batch, samples)
            return [
                Answer(name=s.name, text=text, score=SCORERS[s.scorer](text, s.answers))
                for s, text in zip(samples, texts, strict=True)
            ]
        forced = [s.forced_ids if s.mode == "force" else dense[s.name] for s in samples]
        nll: list[torch.Tensor] = []
        best: list[torch.Tensor] = []
        steps = max(map(len, forced))
        tokens = torch.tensor([ids + [0] * (steps - len(ids)) for ids in forced])
        tokens = tokens.to(self._model.device)
        for i in range(steps):
            if i > 0:  # the first comes from prefill, which is dense
                logprobs = torch.log_softmax(batch.logits.float(), dim=-1)
                nll.append(-logprobs.gather(1, tokens[:, i : i + 1])[:, 0])
                best.append(batch.logits.argmax(-1))
            if i < steps - 1:
                self._step(batch, tokens[:, i], [i < len(ids) - 1 for ids in forced])
        losses, chosen = torch.stack(nll, 1).tolist(), torch.stack(best, 1).tolist()
        if samples[0].mode == "force":
            return [
                Answer(name=s.name, nll=losses[i][: len(forced[i]) - 1])
                for i, s in enumerate(samples)
            ]
        return [
            Answer(
                name=s.name,
                agrees=[a == b for a, b in zip(chosen[i], forced[i][1:], strict=False)],
            )
            for i, s in enumerate(samples)
        ]

    def _prefill(self, ids: list[int]) -> tuple[Any, torch.Tensor]:
        """Return the compressed cache, and the logits after the last token: those are dense's."""
        from transformers import DynamicCache

        cache = DynamicCache()
        tokens = torch.tensor([ids], device=self._model.device)
        if self._press == UNCOMPRESSED:
            hidden = self._model.model(tokens, past_key_values=cache).last_hidden_state
        else:
            with self._make_press(len(ids))(self._model):
                hidden = self._model.model(tokens, past_key_values=cache).last_hidden_state
        return cache, self._model.lm_head(hidden[0, -1])

    def _make_press(self, length: int) -> Any:
        import kvpress

        # kvpress keeps int(length * (1 - ratio)); the half keeps rounding from losing one.
        ratio = max(0.0, 1 - (self._num_kept + 0.5) / length)
        arguments = _ARGUMENTS.get(self._press, {})
        press = getattr(kvpress, _CLASSES[self._press])(compression_ratio=ratio, **arguments)
        if self._exact:
            press.compress = _sparing(press.compress, self._exact)
        return press

    def _step(self, batch: Batch, tokens: torch.Tensor, counts: list[bool]) -> None:
        """Decode one token of each request; `counts` says whose steps are in the share."""
        masks = batch.extended_masks()
        config = self._model.config
        prefill, config._attn_implementation = config._attn_implementation, DECODE_ATTENTION
        _MASKS[:] = masks
        try:
            out = self._model(
                input_ids=tokens[:, None],
                past_key_values=batch.cache,
                position_ids=batch.positions[:, None],
            )
        finally:
            config._attn_implementation = prefill
        for row, counted in enumerate(counts):
            if counted:
                self._attended += sum(batch.lengths[layer][row] for layer in self._counted)
                self._context += len(self._counted) * (batch.contexts[row] + 1)
        batch.advance(out.logits[:, -1])

    def _greedy(self, batch: Batch, samples: list[Sample]) -> list[str]:
        late = [s.question_ids if s.late_question else [] for s in samples]
        ids: list[list[int]] = [[] for _ in samples]
        ended = [False] * len(samples)
        step = 0
        while True:
            chosen = batch.logits.argmax(-1).tolist()
            for row, sample in enumerate(samples):
                if step < len(late[row]):
                    chosen[row] = late[row][step]
                elif not ended[row]:
                    if chosen[row] == self._tokenizer.eos_token_id:
                        ended[row] = True
                        continue
                    ids[row].append(chosen[row])
                    ended[row] = len(ids[row]) == sample.num_new_tokens
            if all(ended):
                break
            tokens = torch.tensor(chosen, device=self._model.device)
            self._step(batch, tokens, [not end for end in ended])
            step += 1
        return [str(self._tokenizer.decode(found, skip_special_tokens=True)) for found in ids]


DECODE_ATTENTION = "kept_tokens"
_MASKS: list[torch.Tensor] = []
"""Of the step under way, ``[B, 1, 1, L]`` a layer: what each request has kept there."""


def _attend_kept(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one decode step, where layers differ in length: transformers has one mask."""
    del attention_mask, dropout, rest
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=_MASKS[module.layer_idx], scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


class Batch:
    """Caches of several prompts, joined with padding before each; masks leave the padding out.

    Attributes
    ----------
    cache
        ``DynamicCache`` of all.
    logits : Tensor [B, V]
        After the last token of each.
    positions : Tensor [B]
        Of the next token.
    contexts : list of int
        Tokens of each request so far.
    lengths : list of list of int
        Kept tokens, of each layer and request, with those of the step under way.
    """

    def __init__(self, caches: list[Any], logits: torch.Tensor, contexts: list[int]) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache()
        self.logits, self.contexts = logits, contexts
        self.positions = torch.tensor(contexts, device=logits.device)
        self.lengths: list[list[int]] = []
        self._masks: list[torch.Tensor] = []
        for layer in range(len(caches[0].layers)):
            keys = [cache.layers[layer].keys for cache in caches]
            values = [cache.layers[layer].values for cache in caches]
            lengths = [key.shape[2] for key in keys]
            self.cache.update(_padded(keys), _padded(values), layer)
            self.lengths.append(lengths)
            places = torch.arange(max(lengths), device=logits.device)
            starts = max(lengths) - torch.tensor(lengths, device=logits.device)
            self._masks.append((places >= starts[:, None])[:, None, None])

    def extended_masks(self) -> list[torch.Tensor]:
        """Return the masks with one more token, which everybody sees."""
        self.lengths = [[length + 1 for length in lengths] for lengths in self.lengths]
        self._masks = [torch.nn.functional.pad(m, (0, 1), value=True) for m in self._masks]
        return self._masks

    def advance(self, logits: torch.Tensor) -> None:
        """Take note of a token decoded for each."""
        self.logits = logits
        self.positions = self.positions + 1
        self.contexts = [context + 1 for context in self.contexts]


def _padded(parts: list[torch.Tensor]) -> torch.Tensor:
    longest = max(part.shape[2] for part in parts)
    pad = torch.nn.functional.pad
    return torch.cat([pad(part, (0, 0, longest - part.shape[2], 0)) for part in parts])


def _sparing(compress: Callable[..., Any], exact: set[int]) -> Callable[..., Any]:
    def spare(module: Any, hidden: Any, keys: Any, values: Any, *rest: Any) -> Any:
        if module.layer_idx in exact:
            return keys, values
        return compress(module, hidden, keys, values, *rest)

    return spare


def configuration(
    press: str, budget: Budget, exact_layers: list[int], num_layers: int
) -> Configuration:
    """Return how a press is called in the report."""
    if press == UNCOMPRESSED:
        return Configuration(
            system="kvpress",
            policy=press,
            budget="all",
            attended_tokens=None,
            num_layers=num_layers,
            sees_question="everything is attended to",
        )
    spared = f", layers {','.join(map(str, exact_layers))} whole" if exact_layers else ""
    return Configuration(
        system="kvpress",
        policy=press + spared,
        budget=budget.text,
        attended_tokens=budget.tokens,
        num_layers=num_layers,
        exact_layers=exact_layers,
        selection=dict(_ARGUMENTS.get(press, {})),
        sees_question="once, when it compresses the prompt; not where it comes late",
    )


def measure(peer: Peer, config: Configuration, task: str, out: Path, batch: int) -> None:
    """Measure one task, `batch` prompts at a time, unless a kept result is of the same kind."""
    samples = read_samples(out / "samples" / f"{task}.jsonl")
    if samples[0].mode == "probe":
        return  # attention mass is measured inside the server
    folder = out / "runs" / config.slug
    wanted = digest(samples_digest(samples), json.dumps(_plain(config), sort_keys=True))
    kept = read_result(folder, task)
    if kept is not None and kept.digest == wanted:
        return
    started, dense = time.monotonic(), {}
    if samples[0].mode == "continue":
        dense = _continuations(out, task, samples)
    answers: list[Answer] = []
    with torch.inference_mode():
        for start in range(0, len(samples), batch):
            answers += peer.ask(samples[start : start + batch], dense)
            print(
                f"\r{config.slug}  {task}  {len(answers)}/{len(samples)}", end="", file=sys.stderr
            )
    print(f"  {time.monotonic() - started:.0f} s", file=sys.stderr)
    result = TaskResult(
        task=task,
        samples_digest=samples_digest(samples),
        digest=wanted,
        answers=answers,
        seconds=round(time.monotonic() - started, 2),
        attended_share=peer.attended_share,
    )
    write_configuration(folder, config)
    write_result(folder, result)


def _plain(config: Configuration) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def _continuations(out: Path, task: str, samples: list[Sample]) -> dict[str, list[int]]:
    for config, results in read_runs(out / "runs"):
        found = results.get(task)
        if config.is_dense and found and found.samples_digest == samples_digest(samples):
            return {answer.name: answer.tokens or [] for answer in found.answers}
    raise SystemExit(f"{task} compares with dense: run `tandemkv quality` with it and --out first")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--out", type=Path, required=True, help="folder of `tandemkv quality`")
    parser.add_argument("--budget", default="12.5%", help="tokens kept, or share of the context")
    parser.add_argument("--presses", default=",".join(PRESSES))
    parser.add_argument("--tasks", help="default: all in --out")
    parser.add_argument("--exact-layers", default="", help="layers that keep everything, e.g. 0,1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=1, help="requests that decode together")
    args = parser.parse_args()
    presses = args.presses.split(",")
    unknown = sorted(set(presses) - set(PRESSES))
    if unknown:
        parser.error(f"no such press: {', '.join(unknown)}; known: {', '.join(PRESSES)}")
    described = json.loads((args.out / "campaign.json").read_text())
    tasks = args.tasks.split(",") if args.tasks else list(described["tasks"])

    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), local_files_only=True
    )
    model.eval().to(args.device)
    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register(DECODE_ATTENTION, _attend_kept)
    exact = [int(part) for part in args.exact_layers.split(",") if part]
    for task in tasks:
        for press in presses:
            (budget,) = parse_budgets([args.budget], [described["tasks"][task]["context_tokens"]])
            config = configuration(press, budget, exact, model.config.num_hidden_layers)
            peer = Peer(model, tokenizer, press, budget.tokens, exact)
            measure(peer, config, task, args.out, args.batch)


if __name__ == "__main__":
    main()
