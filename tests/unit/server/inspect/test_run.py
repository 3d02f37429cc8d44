# SPDX-License-Identifier: Apache-2.0
"""One request of `tandemkv inspect`, before and while it is served."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_model import write_model

from tandemkv.cache_rank.protocol.errors import SettingsError
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


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 2048),
        ({"max_context": 1024}, 1024),
        ({"cache": {"capacity_tokens": 512}}, 512),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_before_a_server_is_started(
    tmp_path: Path, changes: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ServedError(Exception):
        pass

    def serve(*_: Any) -> None:
        raise ServedError

    monkeypatch.setattr(run, "_record", serve)
    tokenizer = SimpleNamespace(encode=lambda text: list(range(len(text))))
    monkeypatch.setattr(run, "load_tokenizer", lambda _: tokenizer)
    given = {"model": str(write_model(tmp_path)), "selection": {"budget_tokens": 128}, **changes}
    settings = ServeSettings.model_validate(given)
    with pytest.raises(SettingsError, match=f"4 are to follow: .* {most} at most; give a shorter"):
        run.inspect_prompt(settings, "a" * (most - 3), max_new_tokens=4)
    with pytest.raises(ServedError):
        run.inspect_prompt(settings, "a" * (most - 4), max_new_tokens=4)
