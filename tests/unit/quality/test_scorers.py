# SPDX-License-Identifier: Apache-2.0
"""Scorers against values worked out by hand."""

from __future__ import annotations

import pytest

from tandemkv.server.evaluation.quality.scorers import SCORERS


@pytest.mark.parametrize(
    ("scorer", "answer", "references", "expected"),
    [
        ("string_match_all", "I saw 12 and ab", ["12", "AB", "7", "8"], 0.5),
        ("string_match_all", "", ["12"], 0.0),
        ("string_match_part", "it is Oslo", ["Lima", "oslo"], 1.0),
        ("string_match_part", "it is Rome", ["Lima", "oslo"], 0.0),
        # {cat, sat, down} against {cat, sat}: precision 2/3, recall 1
        ("qa_f1", "The cat sat down.", ["a cat sat", "dog"], 0.8),
        ("qa_f1", "bird", ["cat"], 0.0),
        # longest common subsequence "a c d" of 4 and 4 words
        ("rouge_l", "a b c d", ["a c d e"], 0.75),
        ("rouge_l", "a b", ["b a"], 0.5),
        ("rouge_l", "", ["b a"], 0.0),
        ("code_similarity", "# why\nx = 1\ny", ["x = 1"], 1.0),
        ("code_similarity", "# only a comment", ["x = 1"], 0.0),
        ("class_match", "\nLocation of it\nPerson", ["location"], 1.0),
        ("class_match", "Person\nLocation", ["location"], 0.0),
        ("first_line_f1", "Paris\nQuestion: and then", ["Paris"], 1.0),
        ("first_line_rouge_l", "a b\nc", ["a b"], 1.0),
        ("number_share", "Paragraph 3, or 4", ["Paragraph 3"], 0.5),
        ("number_share", "none", ["Paragraph 3"], 0.0),
        ("final_number", "so 7, \\boxed{ 042 } as 9 shows", ["42"], 1.0),
        ("final_number", "first 42, then 7", ["42"], 0.0),
        ("final_number", "I do not know", ["42"], 0.0),
        ("final_number", "it is 00", ["0"], 1.0),
        ("final_number", "9" * 5000, ["42"], 0.0),
    ],
)
def test_score(scorer: str, answer: str, references: list[str], expected: float) -> None:
    assert SCORERS[scorer](answer, references) == pytest.approx(expected)


def test_every_scorer_gives_a_perfect_answer_one() -> None:
    for name, scorer in SCORERS.items():
        answer = "42" if name in ("final_number", "number_share") else "forty two"
        assert scorer(answer, [answer]) == 1, name
