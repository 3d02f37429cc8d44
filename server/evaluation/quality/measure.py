# SPDX-License-Identifier: Apache-2.0
"""Ask one server all samples of one task."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tandemkv.server.evaluation.tokenizing import Tokenizer

from .results import Answer, Probes, TaskResult
from .samples import Sample, samples_digest
from .scorers import SCORERS
from .servers import MeasurementError, RunningServer

_CACHED_SHARE = 0.9
"""Of a turn before, at least; less than all, because whole pages are cached."""
_ROW_KINDS = ("sparse", "dense", "exact")  # a slow row is sparse
_LOGPROBS, _BEST = {"return_logprob": True}, {"top_logprobs_num": 1}


def measure(
    server: RunningServer,
    *,
    task: str,
    digest: str,
    samples: Sequence[Sample],
    tokenizer: Tokenizer,
    ends: frozenset[int],
    concurrency: int,
    continuations: Mapping[str, list[int]],
    on_answer: Callable[[Sample], None],
    asked: Sequence[Sample] | None = None,
) -> TaskResult:
    """Return the answers to all samples, and what the counters say.

    Nobody else may be using `server`. `ends` are the tokens that end an answer: nothing behind one
    is scored, for a server goes on where tokens are forced. `continuations` are dense's by sample
    name, for the mode ``continue`` of other servers. `on_answer` is called after each answer, from
    any thread. By default all samples are `asked`. Raises `MeasurementError` if a request fails or
    the server did not do what was asked.
    """
    server.forget()
    before, started = server.counters(), time.monotonic()

    def one(sample: Sample) -> Answer:
        answer = _ask(server, sample, tokenizer, ends, continuations)
        on_answer(sample)
        return answer

    answers = _in_groups(one, samples if asked is None else asked, concurrency)
    seconds, after = time.monotonic() - started, server.counters()
    return TaskResult(
        task=task,
        samples_digest=samples_digest(samples),
        digest=digest,
        answers=answers,
        seconds=round(seconds, 2),
        probes=_read_probes(server) if samples and samples[0].mode == "probe" else None,
        **_per_step({key: value - before.get(key, 0.0) for key, value in after.items()}),
    )


def _in_groups(
    ask: Callable[[Sample], Answer], samples: Sequence[Sample], concurrency: int
) -> list[Answer]:
    """Ask all samples, `concurrency` groups at once, and return the answers in their order."""
    with ThreadPoolExecutor(concurrency) as pool:
        groups = pool.map(lambda group: [ask(sample) for sample in group], _groups(samples))
        found = {answer.name: answer for group in groups for answer in group}
    return [found[sample.name] for sample in samples]


def _groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return samples of one context together: asked one after another, it is prefilled once."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        key = f"context {sample.notes['context']}" if "context" in sample.notes else sample.name
        groups.setdefault(key, []).append(sample)
    return list(groups.values())


def _per_step(counters: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of `TaskResult` that counters give."""
    context = counters.get("inference.context_tokens_total", 0.0)
    rows = sum(counters.get(f"inference.{kind}_rows_total", 0.0) for kind in _ROW_KINDS)
    return {
        "attended_share": counters["inference.attended_tokens_total"] / context
        if context
        else None,
        "fetched_rows_per_step": counters["cache.fetched_rows_total"] / rows if rows else None,
        "decode_steps": counters.get("inference.decode_steps_total"),
        "request_steps": rows or None,
        "counters": {key: value for key, value in counters.items() if value},
    }


def _ask(
    server: RunningServer,
    sample: Sample,
    tokenizer: Tokenizer,
    ends: frozenset[int],
    continuations: Mapping[str, list[int]],
) -> Answer:
    if sample.mode in ("generate", "follow_up"):
        ids = (_generate if sample.mode == "generate" else _follow_up)(server, sample)
        ids = list(itertools.takewhile(lambda token: token not in ends, ids))
        text = tokenizer.decode(ids, skip_special_tokens=True)
        score = SCORERS[sample.scorer](text, sample.answers)
        return Answer(name=sample.name, text=text, score=score)
    if sample.mode == "continue":
        if server.is_stock:
            return _continue_freely(server, sample)
        return _agreement(server, sample, continuations[sample.name])
    wants_best = bool(sample.notes.get("best"))
    if server.is_stock:
        nll, best = _prompt_nll(server, sample, with_best=wants_best)
    else:
        pairs, best = _force(server, sample.prompt_ids, sample.forced_ids, with_best=wants_best)
        # The first token comes from prefill, which is dense.
        nll, best = [-logprob for logprob, *_ in pairs[1:]], best[1:]
    return Answer(name=sample.name, nll=nll, best=best if wants_best else None)


def _greedy(ids: Sequence[int], num_tokens: int, **params: Any) -> dict[str, Any]:
    """Return a request that decodes greedily; `params` are further ones of sampling."""
    sampling = {"max_new_tokens": num_tokens, "temperature": 0, **params}
    return {"input_ids": ids, "sampling_params": sampling}


def _forcing(ids: Sequence[int], forced: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """Return a request whose first tokens are `forced`; no end of turn in them ends it."""
    return _greedy(ids, num_tokens, ignore_eos=True, custom_params={"forced_token_ids": forced})


def _generate(server: RunningServer, sample: Sample) -> list[int]:
    forced: list[int] = []
    if sample.late_question and not server.is_stock:
        forced = sample.question_ids
        body = _forcing(sample.prompt_ids, forced, len(forced) + sample.num_new_tokens)
    else:
        body = _greedy(sample.context_ids + sample.question_ids, sample.num_new_tokens)
    ids = _output_ids(server.generate(body))
    if ids[: len(forced)] != forced:
        raise MeasurementError("the server did not force the question; it must allow evaluation")
    return ids[len(forced) :]


def _follow_up(server: RunningServer, sample: Sample) -> list[int]:
    """Send the context, then the question behind it, as a conversation's next turn does."""
    server.generate(_greedy(sample.context_ids, 1, ignore_eos=True))
    found = server.generate(_greedy(sample.prompt_ids, sample.num_new_tokens))
    # Else it would be one long prompt, and no later turn.
    cached = int(found["meta_info"]["cached_tokens"])
    if cached < _CACHED_SHARE * len(sample.context_ids):
        raise MeasurementError(
            f"of the {len(sample.context_ids)} tokens of the turn before, the server had only "
            f"{cached} cached; lower --concurrency or raise its --cache-tokens"
        )
    return _output_ids(found)


def _continue_freely(server: RunningServer, sample: Sample) -> Answer:
    body = _greedy(sample.prompt_ids, sample.num_new_tokens, ignore_eos=True)
    tokens = _output_ids(server.generate(body))
    if len(tokens) != sample.num_new_tokens:
        raise MeasurementError(f"{len(tokens)} tokens came back of {sample.num_new_tokens}")
    return Answer(name=sample.name, tokens=tokens, agrees=[True] * (len(tokens) - 1))


def _agreement(server: RunningServer, sample: Sample, dense: list[int]) -> Answer:
    _, best = _force(server, sample.prompt_ids, dense, with_best=True)
    agrees = [found == wanted for found, wanted in zip(best, dense, strict=True)]
    return Answer(name=sample.name, agrees=agrees[1:])


def _force(
    server: RunningServer, prompt: list[int], forced: list[int], *, with_best: bool = False
) -> tuple[list[tuple[float, int]], list[int]]:
    """Return (logprob, id) of each forced token, and the id that was likeliest in its place."""
    body = _forcing(prompt, forced, len(forced)) | _LOGPROBS | (_BEST if with_best else {})
    meta = server.generate(body)["meta_info"]
    pairs = [(float(item[0]), int(item[1])) for item in meta["output_token_logprobs"]]
    got = [token for _, token in pairs]
    if got != forced:
        same = [a == b for a, b in zip(got, forced, strict=False)]
        at = same.index(False) if False in same else len(same)
        raise MeasurementError(
            f"the server did not force the tokens (of {len(forced)} it returned {len(got)}, the "
            f"first other one is number {at}); it must allow evaluation"
        )
    best = [int(item[0][1]) for item in meta["output_top_logprobs"]] if with_best else []
    return pairs, best


def _prompt_nll(
    server: RunningServer, sample: Sample, *, with_best: bool
) -> tuple[list[float], list[int]]:
    """Stock SGLang forces nothing; its prefill is dense, so the prompt's own logprobs will do."""
    more = {
        **_LOGPROBS,
        "logprob_start_len": len(sample.prompt_ids),
        **(_BEST if with_best else {}),
    }
    body = _greedy(sample.prompt_ids + sample.forced_ids, 1)
    meta = server.generate(body | more)["meta_info"]
    wanted = sample.forced_ids[1:]
    pairs = meta["input_token_logprobs"][-len(wanted) :]
    if [int(item[1]) for item in pairs] != wanted or any(item[0] is None for item in pairs):
        raise MeasurementError("stock SGLang returned logprobs of other tokens than asked for")
    best = meta["input_top_logprobs"][-len(wanted) :] if with_best else []
    return [-float(item[0]) for item in pairs], [int(item[0][1]) for item in best]


def _output_ids(found: Mapping[str, Any]) -> list[int]:
    ids = found.get("output_ids")
    if not isinstance(ids, list):
        raise MeasurementError(f"/generate returned no output_ids, only {sorted(found)}")
    return [int(token) for token in ids]


def _read_probes(server: RunningServer) -> Probes | None:
    """Average the probes over heads and layers, per step and request; each row's steps together.

    An interval takes neighbours for steps of one request (`block_interval`).
    """
    if server.probe_file is None:
        return None
    text = server.probe_file.read_text() if server.probe_file.exists() else ""
    if not text:
        return None
    steps: dict[tuple[int, int], list[dict[str, Any]]] = {}
    layers: dict[int, list[float]] = {}
    for line in map(json.loads, text.splitlines()):
        steps.setdefault((line["row"], line["decode_step"]), []).append(line)
        layers.setdefault(line["layer"], []).append(float(np.mean(line["mass"])))
    means = {
        key: [float(np.mean([line[key] for line in group])) for _, group in sorted(steps.items())]
        for key in ("mass", "oracle_mass", "recall")
    }
    by_layer = {str(k): float(np.mean(v)) for k, v in sorted(layers.items())}
    return Probes(**means, mass_by_layer=by_layer)
