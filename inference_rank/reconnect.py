# SPDX-License-Identifier: Apache-2.0
"""Meets a cache rank that comes back, in a thread: the scheduler goes on to take requests in."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from tandemkv.cache_rank.protocol.errors import CacheRankError, HandshakeRefusedError

_LOG = logging.getLogger(__name__)
_RETRY_INTERVAL_S = 0.05
_REFUSED_S = 1.0
"""Between two tries where the reason will hardly change."""
_TIMEOUT_S = 10.0
"""For Hello and Welcome; a Hello waits for a cache rank that starts. An engine that is built has
its own time (`SharedConnection.open_connection`)."""


class Reconnecting:
    """Tries until a connection is open. Owned by the scheduler thread.

    `open_connection`, that of `SharedConnection`, is called in a thread, again and again; nothing
    that it raises ends the thread.
    """

    def __init__(self, open_connection: Callable[..., Any]) -> None:
        self._open_connection = open_connection
        self._connection: Any = None
        self._thread = threading.Thread(target=self._run, name="reconnect", daemon=True)
        self._thread.start()

    def take(self) -> Any:
        """Return the connection once it is open; None before. Never waits."""
        return None if self._thread.is_alive() else self._connection

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause_s = _RETRY_INTERVAL_S
            try:
                self._connection = self._open_connection(timeout_s=_TIMEOUT_S)
            except HandshakeRefusedError:
                _LOG.exception("the cache rank that came back refuses this server")
                pause_s = _REFUSED_S
            except CacheRankError as error:
                _LOG.warning("no cache rank yet: %s", error)
            except Exception:  # whatever it is, the next try may succeed
                _LOG.exception("reconnecting failed")
                pause_s = _REFUSED_S
            else:
                return
            pause.wait(pause_s)
