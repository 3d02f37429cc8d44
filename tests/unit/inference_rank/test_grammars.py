# SPDX-License-Identifier: Apache-2.0
"""Grammars that leave no token to sample end their own request, not SGLang's scheduler.

Penalties and masks are applied as SGLang's ModelRunner does, by what is hooked there.
"""

from __future__ import annotations

from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xgrammar
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.layers.sampler import sampling_from_probs_torch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from tandemkv.cache_rank.protocol.settings.rank_settings import SETTINGS_VARIABLE, RankSettings
from tandemkv.inference_rank.sglang import versions as sglang_versions
from tandemkv.inference_rank.sglang.hooks import scheduler_hooks

_WORDS = [bytes([97 + place]) for place in range(31)]
_END = len(_WORDS)
"""The token that ends an answer; before it are a, b, c ..."""
_NEVER = float("-inf")


class _Grammar(XGrammarGrammar):  # type: ignore[misc]
    """One whose mask can be made and applied on a CPU as well."""

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> torch.Tensor:
        return xgrammar.allocate_token_bitmask(batch_size, vocab_size)

    def apply_vocab_mask(self, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


@pytest.fixture(autouse=True)
def _hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hook what the plugin hooks of these."""
    monkeypatch.setenv(SETTINGS_VARIABLE, RankSettings().model_dump_json())
    for target, hook, _ in scheduler_hooks("tandemkv"):
        path, _, name = target.rpartition(".")
        if path.endswith(".SamplingBatchInfo"):
            original = getattr(SamplingBatchInfo, name)
            monkeypatch.setattr(SamplingBatchInfo, name, partialmethod(_around, hook, original))


def _around(self: Any, hook: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    return hook(original, self, *args, **kwargs)


def grammar_of(text: str) -> Any:
    tokens = xgrammar.TokenizerInfo([*_WORDS, b"<end>"], stop_token_ids=[_END])
    compiled = xgrammar.GrammarCompiler(tokens, max_threads=1).compile_grammar(text)
    return _Grammar(xgrammar.GrammarMatcher(compiled), _END + 1, compiled, None)


def masked(grammar: Any, *, forbidden: int | None = None, observer: Any = None) -> torch.Tensor:
    """Return logits of a row without a grammar, and of one with it, as they come to be sampled.

    `forbidden` is what a penalty forbids, as ``min_new_tokens`` does the end.
    """
    info = SamplingBatchInfo.__new__(SamplingBatchInfo)
    penalties = torch.zeros(2, _END + 1)
    if forbidden is not None:
        penalties[1, forbidden] = _NEVER
    found: dict[str, Any] = {
        "grammars": [None, grammar], "vocab_size": _END + 1, "temperatures": torch.ones(2, 1),
        "device": "cpu", "acc_additive_penalties": penalties, "acc_scaling_penalties": None,
        "penalizer_orchestrator": None, "logit_bias": None, "grammar_mask": None,
    }  # fmt: skip
    vars(info).update(found)
    logits = torch.randn(2, _END + 1)
    before = logits.clone()
    options = {} if observer is None else {"observer": observer}
    output = SimpleNamespace(next_token_logits=logits)
    ModelRunner._preprocess_logits(SimpleNamespace(), output, info, **options)
    assert torch.equal(logits[0], before[0])
    return logits


def sampled(logits: torch.Tensor) -> int:
    positions = torch.zeros(len(logits), dtype=torch.int64)
    chosen = sampling_from_probs_torch(logits.softmax(-1), sampling_seed=None, positions=positions)
    return int(chosen.flatten()[1])


@pytest.mark.parametrize("text", ["root ::= root", "root ::= []"])
def test_what_a_grammar_without_a_text_is_given_it_refuses(text: str) -> None:
    grammar = grammar_of(text)
    logits = masked(grammar)
    assert torch.equal(logits[1], torch.zeros(_END + 1))
    with pytest.raises(ValueError, match="not accepted"):  # SGLang then ends the request
        grammar.accept_token(sampled(logits))


def test_an_answer_ends_where_its_grammar_does_though_it_was_to_be_longer() -> None:
    grammar = grammar_of('root ::= "a"')
    grammar.accept_token(0)
    assert sampled(masked(grammar, forbidden=_END)) == _END


def test_what_may_be_sampled_stays_as_it_was() -> None:
    logits = masked(grammar_of('root ::= "a" | "b"'), forbidden=0)
    assert torch.isneginf(logits[1]).tolist() == [token != 1 for token in range(_END + 1)]
    assert logits[1, 1] != 0


def test_the_same_where_somebody_sees_logits_before_they_are_masked() -> None:
    if len(sglang_versions.masked_logits()) == 1:
        pytest.skip("this SGLang lets nobody see them")
    observer = SimpleNamespace(before_grammar=lambda _logits, _info: "seen")
    logits = masked(grammar_of("root ::= []"), observer=observer)
    assert torch.equal(logits[1], torch.zeros(_END + 1))
