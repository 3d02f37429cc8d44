# SPDX-License-Identifier: Apache-2.0
"""What SGLang's scheduler calls between passes, by the names of the oldest and newest versions."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.mem_cache import common

from tandemkv.inference_rank.sglang.versions import OLDEST, VERSIONS, installed

_INSTALLED = installed() or OLDEST
IS_NEW = _INSTALLED in VERSIONS[5:]
"""0.5.22 and later; those from 0.5.19 to 0.5.21 have some names of each."""
if not IS_NEW and _INSTALLED not in VERSIONS[:2]:
    pytest.skip("this loop has the names of 0.5.17 and of 0.5.22", allow_module_level=True)


def checkpoint(req: Any, tree_cache: Any, *, is_chunk: bool = False) -> None:
    """Let the radix tree have what is computed of a request that goes on."""
    if IS_NEW:
        if not is_chunk or req.extend_end > req.prefix_len:
            common.checkpoint_kv_cache(req, tree_cache)
    else:
        more = {"chunked": True} if is_chunk else {}
        common.maybe_cache_unfinished_req(req, tree_cache, **more)


def end(req: Any, tree_cache: Any) -> None:
    """Give back what a finished request holds, and let the radix tree have it."""
    common.release_kv_cache(req, tree_cache, **({"checkpoint": True} if IS_NEW else {}))


def leave_out(batch: Any, requests: list[Any]) -> None:
    """Take `requests`, and those that have ended, out of a batch."""
    name = "reqs_to_exclude" if IS_NEW else "chunked_req_to_exclude"
    batch.filter_batch(**{name: requests})


def lock(req: Any, tree_cache: Any) -> None:
    """Keep the prefix of a request that begins."""
    if IS_NEW:
        req.lock = tree_cache.lock(req.last_node)
    else:
        tree_cache.inc_lock_ref(req.last_node)


def start_of(req: Any) -> int:
    """First position that the request's prompt pass computes."""
    return int(req.prefix_len) if IS_NEW else len(req.prefix_indices)


def end_of(req: Any) -> int:
    """Position behind the last one."""
    return int(req.extend_end if IS_NEW else req.extend_range.end)


def compute_up_to(req: Any, end: int) -> None:
    """Let the next pass compute a prompt from `start_of` to `end`."""
    if IS_NEW:
        req.extend_end = end
    else:
        req.set_extend_range(start_of(req), end)


def ending(batch: Any, queue: Any) -> list[Any]:
    """Return who ends with the pass under way: the newer overlap loop decodes them no further."""
    if not IS_NEW or not queue:
        return []
    under_way = set(queue[0][0].reqs)
    return [r for r in batch.reqs if r in under_way and r.next_output_finishes_by_length()]
