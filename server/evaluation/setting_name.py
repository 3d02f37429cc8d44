# SPDX-License-Identifier: Apache-2.0
"""One name for one setting of a selection, by which reports of quality and of speed are joined."""

from __future__ import annotations

import re

from tandemkv.cache_rank.protocol.settings.rank_settings import (
    DEFAULT_POLICY,
    SelectionSettings,
)

_NAME = re.compile(
    r"(?:(?P<policy>[a-z][a-z_]*)-)?k(?P<k>\d+)-c(?P<c>[\d.]+)-cap(?P<cap>\d+)-s(?P<samples>\d+)"
    r"-(?P<index>native|int8|int4)-x(?P<exact>none|[\d.]+)"
)
_RING_ONLY = re.compile(r"streaming-\d+")


def setting_name(selection: SelectionSettings) -> str:
    """Return the name, e.g. ``k1024-c2-cap64-s128-int4-xnone``.

    K, c, fetch cap, sample tokens, index and exact layers; a policy other than the default comes
    first. A policy that keeps the sink alone is named by its tokens: ``streaming-2176``. Nothing of
    `selection` is left open (`resolve_placement`).
    """
    if selection.declared.keeps_sink_only:
        return f"{selection.policy}-{selection.row_tokens}"
    policy = "" if selection.policy == DEFAULT_POLICY else f"{selection.policy}-"
    exact = ".".join(map(str, selection.exact_layer_ids)) or "none"
    return (
        f"{policy}k{selection.budget_tokens}-c{selection.resident_factor:g}"
        f"-cap{selection.fetch_cap_tokens}-s{selection.num_samples}"
        f"-{selection.index_dtype}-x{exact}"
    )


def is_setting_name(text: str) -> bool:
    """Whether `setting_name` makes such names."""
    return bool(_NAME.fullmatch(text) or _RING_ONLY.fullmatch(text))


def describe_setting(name: str) -> str:
    """Return a name of `setting_name` as a person reads it; another text as it is."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name.replace("streaming-", "streaming, ") if _RING_ONLY.fullmatch(name) else name
    parts = [
        f"K {found['k']}", f"c {found['c']}", f"cap {found['cap']}",
        f"{found['samples']} samples" if found["samples"] != "0" else "no samples",
        found["index"],
    ]  # fmt: skip
    if found["exact"] != "none":
        parts.append(f"layers {found['exact'].replace('.', ', ')} exact")
    if found["policy"]:
        parts.insert(0, found["policy"])
    return ", ".join(parts)
