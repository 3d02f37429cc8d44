# SPDX-License-Identifier: Apache-2.0
"""``tandemkv alive``: whether a process of a run directory answers, for probes of containers.

Imports no torch: it is run every few seconds.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.memory.descriptor_holder import ask_holder
from tandemkv.cache_rank.protocol.run_dir import RunDir

_ANSWER_S = 2.0


class Role(StrEnum):
    """A process that nothing but its run directory leads to."""

    MEMORY = "memory"
    CACHE_RANK = "cache-rank"


def check_alive(role: Role, path: Path, *, hang_timeout_s: float) -> None:
    """Return if `role` of the run directory `path` answers and its work moves.

    Raises
    ------
    SettingsError
        If there is no such run directory.
    CacheRankLostError
        If nobody answers, or the work has not moved for `hang_timeout_s`.
    """
    run_dir = RunDir.open(path)
    if role is Role.MEMORY:
        ask_holder(run_dir.holder_socket, token=run_dir.token, timeout_s=_ANSWER_S)
        return
    reply = request_status(run_dir.heartbeat_socket, _ANSWER_S)
    stalled_s = reply.values["stalled_s"]
    if stalled_s > hang_timeout_s:
        raise CacheRankLostError(
            f"its work has not moved for {stalled_s:.0f} s, allowed are {hang_timeout_s:g} s "
            "(--hang-timeout-s)"
        )
