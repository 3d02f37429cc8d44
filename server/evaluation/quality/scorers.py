# SPDX-License-Identifier: Apache-2.0
"""Scores of an answer against its references, between 0 and 1."""

from __future__ import annotations

import collections
import difflib
import re
import string
from collections.abc import Callable, Sequence

Scorer = Callable[[str, Sequence[str]], float]


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the answer, case ignored (RULER, arXiv:2404.06654)."""
    return sum(r.lower() in answer.lower() for r in references) / len(references)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """1 if any reference occurs in the answer, case ignored (RULER's question answering)."""
    return float(any(r.lower() in answer.lower() for r in references))


def qa_f1(answer: str, references: Sequence[str]) -> float:
    """Best F1 over bags of words, after SQuAD's normalisation (LongBench, arXiv:2308.14508)."""
    return max(_f1(_normalise(answer).split(), _normalise(r).split()) for r in references)


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """Best F1 over the longest common subsequence of words.

    LongBench's summaries. Deviation: words are split at white space, one sentence a text.
    """
    return max(_rouge_l(answer.split(), r.split()) for r in references)


def code_similarity(answer: str, references: Sequence[str]) -> float:
    """Similarity of the first line that is code (LongBench's ``lcc``, ``repobench-p``).

    `difflib`'s ratio, which is what fuzzywuzzy's ``ratio`` is without its C extension.
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(c in x for c in ("`", "#", "//"))), "")
    return max(difflib.SequenceMatcher(None, line, r).ratio() for r in references)


def number_share(answer: str, references: Sequence[str]) -> float:
    """Share of the numbers in the answer that are the reference's number.

    LongBench's ``passage_count`` and ``passage_retrieval_en``.
    """
    wanted = {found for r in references for found in re.findall(r"\d+", r)}
    numbers = re.findall(r"\d+", answer)
    return sum(n in wanted for n in numbers) / len(numbers) if numbers else 0.0


def final_number(answer: str, references: Sequence[str]) -> float:
    r"""1 if the last ``\boxed{}``, or else the last number, is the reference (AIME)."""
    boxed = re.findall(r"\\boxed\{\s*([^{}]*?)\s*\}", answer)
    numbers = re.findall(r"\d+", boxed[-1] if boxed else answer)
    # As texts: Python refuses to read a number of more than 4300 digits, which a model may write.
    return float(bool(numbers) and numbers[-1].lstrip("0") in {r.lstrip("0") for r in references})


def _of_first_line(scorer: Scorer) -> Scorer:
    return lambda answer, references: scorer(answer.lstrip("\n").split("\n")[0], references)


SCORERS: dict[str, Scorer] = {
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    "qa_f1": qa_f1,
    "rouge_l": rouge_l,
    "code_similarity": code_similarity,
    # Of LongBench's few-shot tasks. Deviation: for trec it divides by the number of class names
    # that occur in the answer.
    "class_match": _of_first_line(string_match_part),
    "first_line_f1": _of_first_line(qa_f1),
    "first_line_rouge_l": _of_first_line(rouge_l),
    "number_share": number_share,
    "final_number": final_number,
}


def _normalise(text: str) -> str:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _f1(found: list[str], wanted: list[str]) -> float:
    common = sum((collections.Counter(found) & collections.Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def _rouge_l(found: list[str], wanted: list[str]) -> float:
    row = [0] * (len(wanted) + 1)
    for word in found:
        diagonal = 0
        for j, other in enumerate(wanted, 1):
            diagonal, row[j] = row[j], diagonal + 1 if word == other else max(row[j], row[j - 1])
    return 2 * row[-1] / (len(found) + len(wanted)) if row[-1] else 0.0
