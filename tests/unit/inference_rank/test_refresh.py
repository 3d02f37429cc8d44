# SPDX-License-Identifier: Apache-2.0
"""When a step of a sparse row is slow, and which tokens end a sentence."""

import pytest

from tandemkv.cache_rank.policies.registry import resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.messages import RefreshRule
from tandemkv.inference_rank.refresh import RefreshSchedule, schedule_for, trigger_token_ids

WORDS = ["a", ".", " end.", "e.g", "?", "!\n", ";", "\n\n", "1.5", "..", " ", ".)", "\n  ", ". "]


class Words:
    """A tokenizer of whole words."""

    def get_vocab(self):
        return {word: number for number, word in enumerate(WORDS)}

    def decode(self, token_ids):
        return "".join(WORDS[number] for number in token_ids)


def texts(endings):
    return [WORDS[number] for number in sorted(trigger_token_ids(Words(), endings, "sfi"))]


def test_triggers_are_found_by_the_end_of_their_text():
    assert texts(".?!;\n") == [".", " end.", "?", "!\n", ";", "\n\n", ".."]
    assert texts("\n") == ["!\n", "\n\n"]


def test_triggers_that_cannot_fire_are_refused():
    with pytest.raises(SettingsError, match=r"policy=sfi: no token.*tandemkv policies sfi"):
        trigger_token_ids(Words(), "%", "sfi")


def slow_steps(schedule, tokens, *, row=1):
    return [i for i, token in enumerate(tokens) if schedule.is_slow(row, token)]


def test_first_trigger_and_longest_interval():
    schedule = RefreshSchedule(RefreshRule.BOUNDARY, 4, frozenset((9,)))
    assert schedule.wants_tokens
    assert slow_steps(schedule, [0, 0, 9, 0, 0, 0, 0, 0, 9, 9, 0]) == [0, 2, 6, 8, 9]


def test_every_fifth_step():
    schedule = RefreshSchedule(RefreshRule.PERIOD, 5)
    assert not schedule.wants_tokens
    assert slow_steps(schedule, [None] * 12) == [0, 5, 10]


def test_a_new_tenant_of_a_row_starts_anew_and_rows_do_not_mix():
    schedule = RefreshSchedule(RefreshRule.PERIOD, 3)
    assert slow_steps(schedule, [None] * 2) == [0]
    assert slow_steps(schedule, [None] * 2, row=2) == [0]
    assert slow_steps(schedule, [None] * 2) == [1]
    schedule.restart(1)
    assert slow_steps(schedule, [None] * 2) == [0]


def test_never_and_padding():
    assert slow_steps(RefreshSchedule(), [None] * 3) == []
    assert slow_steps(RefreshSchedule(RefreshRule.PERIOD, 1), [None] * 3, row=0) == []


def schedule(**selection):
    return schedule_for(resolve_selection(selection), Words)


def test_the_policy_declares_which_schedule_there_is():
    sfi = schedule(policy="sfi", options={"triggers": "?", "max_interval": 9})
    assert (sfi.period, sfi.triggers) == (9, {WORDS.index("?")})
    sync = schedule(policy="sync_kv", options={"stride": 3})
    assert (sync.rule, sync.period, sync.triggers) == (RefreshRule.PERIOD, 3, frozenset())
    assert schedule().rule is RefreshRule.NEVER
