# SPDX-License-Identifier: Apache-2.0
"""An id is taken until SGLang's scheduler has done with its request.

Up to 0.5.19 SGLang's HTTP process forgets a request when its client leaves, while the scheduler
still has it. A next request of that id would be given what is left of the first one's answer, and
both in one batch would end the server. 0.5.18 and 0.5.19 do not tell the scheduler, either.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    TokenizedGenerateReqInput,
)

_FAMILY = "_tandemkv_ids"
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


class HeldIds:
    """The ids that the scheduler has, in the process of one `TokenizerManager`.

    `aborts`: whether a request that is forgotten has to be aborted, because SGLang does not. Its
    family are its ids, and those of its samples: SGLang makes them of copies of its parts.
    """

    def __init__(self, *, aborts: bool) -> None:
        self._aborts = aborts
        self._held: set[str] = set()

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """Return AROUND hooks by their targets."""
        return {
            f"{_MANAGER}._dispatch_to_scheduler": self.around_dispatch,
            f"{_MANAGER}._init_req_state": self.around_init,
            f"{_MANAGER}._discard_pending_req_states": self.around_discard,
            f"{_MANAGER}._handle_batch_output": self.around_output,
            f"{_MANAGER}._handle_abort_req": self.around_aborted,
        }

    def around_dispatch(self, original: Callable[..., None], manager: Any, obj: Any) -> None:
        """Hold the ids of requests that are sent. Health checks are given no last word."""
        original(manager, obj)
        sent = obj.batch if isinstance(obj, BatchTokenizedGenerateReqInput) else [obj]
        self._held |= {
            request.rid
            for request in sent
            if isinstance(request, TokenizedGenerateReqInput)
            and not request.rid.startswith(HEALTH_CHECK_RID_PREFIX)
        }

    def around_init(
        self, original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Refuse a new request of a held id, in SGLang's words; raises `ValueError`."""
        for rid in _ids_of(obj):
            if rid in self._held:
                raise ValueError(f"Duplicate request ID detected: {rid}")
        found = original(manager, obj, *args, **kwargs)
        if self._aborts:
            family = vars(obj).setdefault(_FAMILY, set())
            family.update(_ids_of(obj))
            for place in range(0 if _is_single(obj) else len(obj.rid)):
                vars(obj[place])[_FAMILY] = family
        return found

    def around_discard(
        self, original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Abort what the scheduler has of a request that is forgotten."""
        if not self._aborts:
            return original(manager, obj, *args, **kwargs)
        family = vars(obj).get(_FAMILY, set())
        for rid in sorted(family):
            state = manager.rid_to_state.get(rid)
            if state is None or vars(state.obj).get(_FAMILY) is not family:
                continue  # it had ended, and a later request may have its id
            if rid in self._held:
                manager._dispatch_to_scheduler(AbortReq(rid=rid))
            del manager.rid_to_state[rid]
        return None

    def around_output(
        self, original: Callable[..., Coroutine[Any, Any, None]], manager: Any, recv_obj: Any
    ) -> Coroutine[Any, Any, None]:
        """Release the ids of requests that have ended."""
        ends = zip(recv_obj.rids, recv_obj.finished_reasons, strict=True)
        self._held -= {rid for rid, reason in ends if reason is not None}
        return original(manager, recv_obj)

    def around_aborted(self, original: Callable[..., Any], manager: Any, recv_obj: Any) -> Any:
        """Release the id of a request that ended before it was run."""
        self._held.discard(recv_obj.rid)
        return original(manager, recv_obj)


def _is_single(obj: Any) -> bool:
    """Tell whether it is one request; SGLang does not say so of the parts of several."""
    return bool(getattr(obj, "is_single", True))


def _ids_of(obj: Any) -> list[str]:
    return [obj.rid] if _is_single(obj) else list(obj.rid)
