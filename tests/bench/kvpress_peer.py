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
is dense's in both systems. Tokens are decoded one by one, so that layers may keep different
numbers. PyramidKV gets window_size=8, the paper's: with kvpress's default of 64 it falls back to
SnapKV at small budgets.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tandemkv.server.quality.configurations import Budget, Configuration, parse_budgets
from tandemkv.server.quality.results import (
    Answer,
    TaskResult,
    read_result,
    read_runs,
    write_configuration,
    write_result,
)
from tandemkv.server.quality.samples import Sample, digest, read_samples, samples_digest
from tandemkv.server.quality.scorers import SCORERS

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

    def ask(self, sample: Sample, dense: dict[str, list[int]]) -> Answer:
        """Answer one sample, as `tandemkv.server.quality.measure` has a server do."""
        cache, logits = self._prefill(sample.prompt_ids)
        position = len(sample.prompt_ids)
        if sample.mode == "generate":
            late = sample.question_ids if sample.late_question else []
            for token in late:
                logits = self._step(cache, token, position)
                position += 1
            text = self._greedy(cache, logits, position, sample.num_new_tokens)
            score = SCORERS[sample.scorer](text, sample.answers)
            return Answer(name=sample.name, text=text, score=score)
        forced = sample.forced_ids if sample.mode == "force" else dense[sample.name]
        nll, agrees = [], []
        for i, token in enumerate(forced):
            if i > 0:  # the first comes from prefill, which is dense
                logprobs = torch.log_softmax(logits.float(), dim=-1)
                nll.append(-float(logprobs[token]))
                agrees.append(int(logits.argmax()) == token)
            if i < len(forced) - 1:
                logits = self._step(cache, token, position + i)
        if sample.mode == "force":
            return Answer(name=sample.name, nll=nll)
        return Answer(name=sample.name, agrees=agrees)

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

    def _step(self, cache: Any, token: int, position: int) -> torch.Tensor:
        device = self._model.device
        out = self._model(
            input_ids=torch.tensor([[token]], device=device),
            past_key_values=cache,
            position_ids=torch.tensor([[position]], device=device),
        )
        self._attended += sum(int(cache.layers[i].keys.shape[2]) for i in self._counted)
        self._context += len(self._counted) * (position + 1)
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def _greedy(self, cache: Any, logits: torch.Tensor, position: int, count: int) -> str:
        ids: list[int] = []
        while len(ids) < count:
            token = int(logits.argmax())
            if token == self._tokenizer.eos_token_id:
                break
            ids.append(token)
            if len(ids) < count:
                logits = self._step(cache, token, position)
                position += 1
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


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


def measure(peer: Peer, config: Configuration, task: str, out: Path) -> None:
    """Measure one task, unless the kept result is of the same samples and settings."""
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
    answers = []
    with torch.inference_mode():
        for i, sample in enumerate(samples, 1):
            answers.append(peer.ask(sample, dense))
            print(f"\r{config.slug}  {task}  {i}/{len(samples)}", end="", file=sys.stderr)
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
    exact = [int(part) for part in args.exact_layers.split(",") if part]
    for press in presses:
        for task in tasks:
            (budget,) = parse_budgets([args.budget], described["tasks"][task]["context_tokens"])
            config = configuration(press, budget, exact, model.config.num_hidden_layers)
            measure(Peer(model, tokenizer, press, budget.tokens, exact), config, task, args.out)


if __name__ == "__main__":
    main()
