# SPDX-License-Identifier: Apache-2.0
"""When a step of a sparse row is slow, and which tokens end a sentence."""

import pytest

from tandemkv.cache_rank.policies.registry import resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.messages import RefreshRule
from tandemkv.cache_rank.protocol.settings import RankSettings
from tandemkv.inference_rank.counters import Counters
from tandemkv.inference_rank.refresh import RefreshSchedule, trigger_token_ids
from tandemkv.inference_rank.runtime import Runtime

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


def slow_steps(schedule, tokens, *, row=1, generation=1):
    return [i for i, token in enumerate(tokens) if schedule.is_slow(row, generation, token)]


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
    assert slow_steps(schedule, [None] * 2, generation=2) == [0]
    schedule.forget()
    assert slow_steps(schedule, [None], generation=2) == [0]


def test_never_and_padding():
    assert slow_steps(RefreshSchedule(), [None] * 3) == []
    assert slow_steps(RefreshSchedule(RefreshRule.PERIOD, 1), [None] * 3, row=0) == []


def runtime_of(load_tokenizer=Words, **selection):
    return Runtime(
        settings=RankSettings(selection=resolve_selection(selection)),
        model=None,
        client=None,
        resident=None,
        counters=Counters(),
        req_to_token_pool=None,
        load_tokenizer=load_tokenizer,
    )


def test_the_policy_declares_which_schedule_there_is():
    sfi = runtime_of(policy="sfi", options={"triggers": "?", "max_interval": 9})
    schedule = sfi.schedule_for()
    assert (schedule.period, schedule.triggers) == (9, {WORDS.index("?")})
    sync = runtime_of(policy="sync_kv", options={"stride": 3}).schedule_for()
    assert (sync.rule, sync.period, sync.triggers) == (RefreshRule.PERIOD, 3, frozenset())
    assert runtime_of().schedule_for().rule is RefreshRule.NEVER


def test_the_vocabulary_is_read_once():
    reads = []
    runtime = runtime_of(lambda: reads.append(1) or Words(), policy="sfi")
    runtime.refresh = runtime.schedule_for()
    again = runtime.schedule_for()
    assert again.triggers == runtime.refresh.triggers
    assert reads == [1]
    with pytest.raises(SettingsError, match="tokenizer"):
        runtime_of(None, policy="sfi").schedule_for()
