# SPDX-License-Identifier: Apache-2.0
"""Link ``message``: an epoch that does not open, or takes long to, ends nothing but itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from message_pumps import FarForward, far_played
from shared_forward import settings_of

from tandemkv.cache_rank.protocol.errors import HandshakeRefusedError, ProtocolError
from tandemkv.cache_rank.pump import far_service

pytestmark = pytest.mark.timeout(120)
_SETTINGS = settings_of(
    "last_query", {"link": "message", "two_gpus": True}, index_dtype="int8", sample_tokens=8
)


def _leave(played: FarForward) -> None:
    """End the epoch, so that another one can be opened."""
    played.connection.leave("a test")
    played.link.rewind()


def test_why_the_other_host_does_not_meet_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ProtocolError("the GPUs are of another kind")

    with far_played(tmp_path, _SETTINGS) as (played, _):
        _leave(played)
        with monkeypatch.context() as patched:
            patched.setattr(far_service, "meet_host", fail)
            with pytest.raises(HandshakeRefusedError, match="the GPUs are of another kind"):
                played.connection.open_connection(timeout_s=15)
        played.connection.open_connection(timeout_s=30).close()
