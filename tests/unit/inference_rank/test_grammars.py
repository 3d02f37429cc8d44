# SPDX-License-Identifier: Apache-2.0
"""Grammars that leave no token to sample end their own request, not SGLang's scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xgrammar
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.layers.sampler import sampling_from_probs_torch

from tandemkv.inference_rank.sglang.grammars import leave_a_token

_WORDS = [bytes([97 + place]) for place in range(31)]
_END = len(_WORDS)
"""The token that ends an answer; before it are a, b, c ..."""


def _matcher(grammar: str) -> Any:
    tokens = xgrammar.TokenizerInfo([*_WORDS, b"<end>"], stop_token_ids=[_END])
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1)
    return xgrammar.GrammarMatcher(compiler.compile_grammar(grammar))


def _sampled(matcher: Any, *, forbidden: int | None) -> list[int]:
    """Sample for a row without a grammar, and for one with it, as SGLang does."""
    logits = torch.randn(2, _END + 1)
    if forbidden is not None:
        logits[1, forbidden] = float("-inf")
    bitmask = xgrammar.allocate_token_bitmask(2, _END + 1)
    matcher.fill_next_token_bitmask(bitmask, 1)
    apply = xgrammar.apply_token_bitmask_inplace
    grammar: Any = SimpleNamespace(
        apply_vocab_mask=lambda logits, vocab_mask: apply(logits, vocab_mask)
    )
    mask = GrammarMask(grammar, bitmask)
    mask.apply(logits)
    before = logits.clone()
    info = SimpleNamespace(grammar_mask=mask)
    leave_a_token(None, SimpleNamespace(next_token_logits=logits), info, False)
    assert torch.equal(logits[0], before[0])
    if not torch.isneginf(before[1]).all():
        assert torch.equal(logits, before)
    chosen = sampling_from_probs_torch(
        logits.softmax(-1), sampling_seed=None, positions=torch.zeros(2, dtype=torch.int64)
    )
    return [int(token) for token in chosen.flatten()]


@pytest.mark.parametrize("grammar", ["root ::= root", "root ::= []"])
def test_what_a_grammar_without_a_text_is_given_it_refuses(grammar: str) -> None:
    matcher = _matcher(grammar)
    token = _sampled(matcher, forbidden=None)[1]
    assert not matcher.accept_token(token)


def test_an_answer_ends_where_its_grammar_does_though_it_was_to_be_longer() -> None:
    """As ``min_new_tokens`` forbids the end."""
    matcher = _matcher('root ::= "a"')
    assert matcher.accept_token(0)
    assert _sampled(matcher, forbidden=_END)[1] == _END


def test_what_may_be_sampled_stays_as_it_was() -> None:
    matcher = _matcher('root ::= "a" | "b"')
    assert _sampled(matcher, forbidden=0)[1] == 1


def test_nothing_is_written_without_a_grammar() -> None:
    logits = torch.full((1, 4), float("-inf"))
    output = SimpleNamespace(next_token_logits=logits)
    leave_a_token(None, output, SimpleNamespace(grammar_mask=None), False)
    assert torch.isneginf(logits).all()
