# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of words, a corpus, inputs of a task, and a server that pretends."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tandemkv.server.evaluation.corpus import Corpus
from tandemkv.server.evaluation.quality.servers import MeasurementError
from tandemkv.server.evaluation.quality.tasks.base import TaskInputs
from tandemkv.server.evaluation.tokenizing import PromptBuilder


class WordTokenizer:
    """One token a word with the white space before it; long words are several tokens."""

    eos_token_id = 0

    def __init__(self) -> None:
        self._pieces = ["<eos>"]
        self._ids = {"<eos>": 0}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        found = []
        for piece in re.findall(r"\s*\S{1,6}|\s+", text):
            if piece not in self._ids:
                self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
            found.append(self._ids[piece])
        return found

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self._pieces[i] for i in ids if i or not skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        (message,) = messages
        return f"<user>{message['content']}</user><assistant>"


@pytest.fixture
def tokenizer() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture
def corpus() -> Corpus:
    words = [f"word{i % 97} and thing{i % 31}." for i in range(1500)]
    return Corpus({"first": " ".join(words), "second": "\n".join(reversed(words))})


@pytest.fixture
def inputs(tokenizer: WordTokenizer, corpus: Corpus) -> TaskInputs:
    return TaskInputs(
        prompts=PromptBuilder(tokenizer, "raw"),
        corpus=corpus,
        context_tokens=700,
        num_samples=4,
        num_forced_tokens=40,
        num_long_tokens=100,
    )


STEP_LOGPROB = -0.5


@dataclass
class FakeServer:
    """Stands for `RunningServer`, with a model that always adds one to the last token.

    `answers` maps prompts to tokens that are generated instead; `forces`, `num_kept` (tokens of an
    earlier prompt) and `fails` break it.
    """

    is_stock: bool = False
    probe_file: Path | None = None
    forces: bool = True
    fails: bool = False
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    num_kept: int = 1 << 30
    exact_rows: int = 0
    num_forgotten: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            known = [
                self._common(body["input_ids"], earlier["input_ids"]) for earlier in self.asked
            ]
            self.asked.append(dict(body))
        if self.fails:
            raise MeasurementError("HTTP 503 from /generate: lost")
        prompt, params = list(body["input_ids"]), body["sampling_params"]
        forced = params.get("custom_params", {}).get("forced_token_ids", [])
        if self.is_stock or not self.forces:
            forced = []
        output, best = [], []
        written = self.answers.get(tuple(prompt), [])
        for i in range(params["max_new_tokens"]):
            last = ([*prompt, *output])[-1]
            best.append(written[i] if i < len(written) else last + 1)
            output.append(forced[i] if i < len(forced) else best[-1])
        pairs = [[STEP_LOGPROB, token, None] for token in output]
        meta: dict[str, Any] = {"output_token_logprobs": pairs}
        meta["cached_tokens"] = min(self.num_kept, max(known, default=0))
        if "top_logprobs_num" in body:
            meta["output_top_logprobs"] = [[[-0.1, token, None]] for token in best]
        if "logprob_start_len" in body:
            tokens = prompt[body["logprob_start_len"] :]
            meta["input_token_logprobs"] = [[None, tokens[0], None]] + [
                [STEP_LOGPROB, token, None] for token in tokens[1:]
            ]
            if "top_logprobs_num" in body:
                best = [[[-0.1, token + 1, None]] for token in tokens[:-1]]
                meta["input_top_logprobs"] = [None, *best]
        return {"output_ids": output, "meta_info": meta}

    @staticmethod
    def _common(ids: list[int], other: list[int]) -> int:
        same = [a == b for a, b in zip(ids, other, strict=False)]
        return same.index(False) if False in same else len(same)

    def start_plan(self) -> dict[str, float]:
        return {} if self.is_stock else {"plan_refresh_steps": 1.0}

    def forget(self) -> None:
        self.num_forgotten += 1

    def counters(self) -> dict[str, float]:
        if self.is_stock:
            return {}
        count = float(len(self.asked))
        return {
            "inference.attended_tokens_total": 30 * count,
            "inference.context_tokens_total": 120 * count,
            "inference.sparse_rows_total": 4 * count,
            "inference.dense_rows_total": 0.0,
            "inference.exact_rows_total": self.exact_rows * count,
            "inference.decode_steps_total": 4 * count,
            "cache.fetched_rows_total": 10 * count,
        }


@pytest.fixture
def fake_server() -> type[FakeServer]:
    return FakeServer
