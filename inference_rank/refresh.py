# SPDX-License-Identifier: Apache-2.0
"""Which decode steps of a sparse row are slow. Decided here, because here the tokens are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tandemkv.cache_rank.protocol.engine import PADDING_ROW
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.messages import RefreshRule
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings


def trigger_token_ids(tokenizer: Any, endings: str, policy: str) -> frozenset[int]:
    """Return the ids of a Hugging Face tokenizer's tokens whose text ends in one of `endings`.

    What follows in the same token counts: a newline with the indent of the next line does not end
    in a newline. Special tokens count by their text as well. Raises `SettingsError` if no token of
    the vocabulary does: the trigger could never fire.
    """
    wanted = tuple(endings)
    found = frozenset(
        token
        for token in tokenizer.get_vocab().values()
        if tokenizer.decode([token]).endswith(wanted)
    )
    if not found:
        raise SettingsError(
            f"policy={policy}: no token of this model's vocabulary ends in one of {endings!r}; "
            f"change that option of the policy, which `tandemkv policies {policy}` shows"
        )
    return found


def schedule_for(
    selection: SelectionSettings, load_tokenizer: Callable[[], Any]
) -> RefreshSchedule:
    """Return the schedule that the policy of these settings declares.

    `selection` has the policy's declaration entered. `load_tokenizer` is called where sentences
    have to be told apart. Raises `SettingsError` if no token of the vocabulary ends a sentence.
    """
    declared = selection.declared
    rule = declared.refresh
    if rule is RefreshRule.PERIOD:
        return RefreshSchedule(rule, declared.refresh_interval)
    if rule is RefreshRule.BOUNDARY:
        triggers = trigger_token_ids(load_tokenizer(), declared.refresh_triggers, selection.policy)
        return RefreshSchedule(rule, declared.refresh_interval, triggers)
    return RefreshSchedule()


@dataclass(slots=True)
class RefreshSchedule:
    """Decides for each sparse row of a decode step whether it is slow.

    The first sparse step of a request is slow. After that, by `rule`: every `period` steps,
    or when the token that the step takes in is one of `triggers`, or `period` steps after
    the last slow one (SFI's T_max).
    """

    rule: RefreshRule = RefreshRule.NEVER
    period: int = 1
    triggers: frozenset[int] = frozenset()
    _since: dict[int, int] = field(default_factory=dict)

    @property
    def wants_tokens(self) -> bool:
        """Whether `is_slow` has to be given tokens."""
        return self.rule is RefreshRule.BOUNDARY

    def is_slow(self, row: int, token: int | None) -> bool:
        """Decide one step of a row, in the order of its steps.

        `token` is what the step takes in, the one generated before; None if unknown.
        """
        if self.rule is RefreshRule.NEVER or row == PADDING_ROW:
            return False
        steps = self._since.get(row)
        slow = steps is None or steps + 1 >= self.period
        slow = slow or (self.wants_tokens and token in self.triggers)
        self._since[row] = 0 if steps is None or slow else steps + 1
        return slow

    def restart(self, row: int) -> None:
        """Let the next sparse step of `row` be slow: its tenant, or what is resident, is new."""
        self._since.pop(row, None)

    def snapshot(self) -> dict[int, int]:
        """Return what deciding a step changes."""
        return dict(self._since)

    def rewind(self, state: dict[int, int]) -> None:
        """Go back to where `snapshot` was asked."""
        self._since = dict(state)
