# SPDX-License-Identifier: Apache-2.0
"""How many tokens a page has, where GPUs are their own cache ranks."""

from __future__ import annotations

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings

PAGE_TOKENS = 64
"""Tokens in consecutive slots, which a scan reads in one."""
LONG_PAGE_TOKENS = 128
"""The same where they share the scales of an int4 index: half of the bytes for these.

As many recent tokens are needed, for candidates lie in finished pages
(docs/decisions/0022-pages-of-128.md).
"""


def page_tokens(index_dtype: str, num_recent_tokens: int, *, has_states: bool = False) -> int:
    """Return SGLang's page size for this index; with recurrent states pages are short."""
    is_long = index_dtype == "int4" and num_recent_tokens >= LONG_PAGE_TOKENS and not has_states
    return LONG_PAGE_TOKENS if is_long else PAGE_TOKENS


def check_chunk(chunk_tokens: int, page_size: int) -> None:
    """Refuse chunks of prompts that would end within a page, with `SettingsError`."""
    if chunk_tokens % page_size:
        shorter = f", or --recent-tokens {PAGE_TOKENS} for shorter pages"
        raise SettingsError(
            f"chunked_prefill_size={chunk_tokens} must be a multiple of the {page_size} tokens of "
            f"a page; use {-(-chunk_tokens // page_size) * page_size}"
            f"{'' if chunk_tokens % PAGE_TOKENS else shorter}"
        )


def on_device(selection: SelectionSettings, device: str) -> SelectionSettings:
    """Fill in `index_dtype` and `num_recent_tokens` where they are open: on a GPU an int4 index.

    Neither is touched if another index is asked for, or fewer recent tokens than any page has;
    recent tokens are not if the budget has no room for more of them. A policy that attends has no
    index, and one with slow steps selects by the keys that such a step attends to.
    """
    if device != "cuda" or selection.declared.attends or selection.declared.has_slow_steps:
        return selection
    has_index = "index_dtype" in selection.model_fields_set
    if has_index and selection.index_dtype != "int4":
        return selection
    if not has_index and selection.num_recent_tokens < PAGE_TOKENS:
        return selection
    changes: dict[str, object] = {"index_dtype": "int4"}
    has_room = selection.budget_tokens >= selection.num_sink_tokens + LONG_PAGE_TOKENS
    is_open = "num_recent_tokens" not in selection.model_fields_set
    if is_open and has_room and not selection.declared.keeps_sink_only:
        changes["num_recent_tokens"] = LONG_PAGE_TOKENS
    return selection.model_copy(update=changes)
