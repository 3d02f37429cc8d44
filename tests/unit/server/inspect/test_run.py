# SPDX-License-Identifier: Apache-2.0
"""One request of `tandemkv inspect`, before and while it is served."""

import contextlib
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tandemkv.server.evaluation.inspect import run
from tandemkv.server.settings.launch_settings import ServeSettings


def test_sigterm_ends_the_server_and_its_files_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = []

    @contextlib.contextmanager
    def server(*_: Any, **__: Any) -> Iterator[Any]:
        def generate(_: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

        try:
            yield SimpleNamespace(generate=generate)
        finally:
            ended.append(True)

    monkeypatch.setattr(run, "tandem_server", server)
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # else the old code ended the tests
    try:
        with pytest.raises(KeyboardInterrupt):
            run._record(ServeSettings.model_validate({"model": "m"}), [1], 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended
