# SPDX-License-Identifier: Apache-2.0
"""What a server says about being ready, in words."""

from __future__ import annotations

import pytest

from tandemkv.server.launch import probes


@pytest.mark.parametrize(
    ("reply", "want"),
    [
        ((200, b'{"ready": true}'), (True, True, '{"ready": true}')),
        ((503, b'{"ready": false, "reason": "SGLang warms up"}'), (True, False, "SGLang warms up")),
        ((503, b'{"ready": false}'), (True, False, '{"ready": false}')),
        ((503, b"[1]"), (True, False, "[1]")),
        ((500, b"a\n b"), (True, False, "a b")),
        ((500, b""), (True, False, "HTTP 500")),
        ((404, b"{}"), (True, False, "the server runs without the tandemkv plugin")),
    ],
)
def test_replies(
    reply: tuple[int, bytes], want: tuple[bool, bool, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_get", lambda _address, _timeout_s: reply)
    assert tuple(probes.server_state("http://127.0.0.1:1")) == (*want, False)


@pytest.mark.parametrize(
    ("body", "who"),
    [
        (b'{"ready": true, "instance": "b"}', "a server of tandemkv that was started elsewhere"),
        (b'{"ready": true}', "a server that was started elsewhere"),
        (b"<html>", "a server that was started elsewhere"),
    ],
)
def test_another_server_is_not_taken_for_one_s_own(
    body: bytes, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_get", lambda _address, _timeout_s: (200, body))
    found = probes.server_state("http://127.0.0.1:1", instance="a")
    assert (found.ready, found.is_other) == (False, True)
    assert found.detail.startswith(who)
    assert "--port" in found.detail
    monkeypatch.setattr(probes, "_get", lambda _address, _timeout_s: (500, b"oh"))
    assert not probes.server_state("http://127.0.0.1:1", instance="a").is_other
    own = b'{"ready": true, "instance": "a"}'
    monkeypatch.setattr(probes, "_get", lambda _address, _timeout_s: (200, own))
    assert probes.server_state("http://127.0.0.1:1", instance="a").ready


def test_nobody_there() -> None:
    found = probes.server_state("http://127.0.0.1:9", timeout_s=0.5)
    assert not found.reachable
    assert not found.ready


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_status_of_the_address_that_serve_prints(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        probes, "_get", lambda address, timeout_s: asked.append(address) or (200, b"{}")
    )
    probes.fetch_status(f"http://127.0.0.1:30000{end}")
    assert asked == ["http://127.0.0.1:30000/tandemkv/status"]
