# SPDX-License-Identifier: Apache-2.0
"""Bad input to the real command: one clear line, at once, and no traceback."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from bad_input import (
    FLAGS,
    MODELS,
    is_clear,
    names_cache_rank,
    occupy,
    serve,
    sglang_alone,
    unsupported_model,
)
from rank_servers import model_dir

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str) -> None:
    args, word = FLAGS[name]
    found = serve([model_dir(), *args])
    assert is_clear(found, word), found


@pytest.mark.parametrize("name", MODELS)
def test_unsupported_models(tmp_path: Path, name: str) -> None:
    change, word = MODELS[name]
    found = serve([str(unsupported_model(tmp_path / "model", change))])
    assert is_clear(found, word), found


def test_port_in_use() -> None:
    with socket.socket() as taken:
        port = occupy(taken)
        found = serve([model_dir(), "--port", str(port)])
    assert is_clear(found, str(port)), found


@pytest.mark.parametrize("variables", [{}, {"TANDEMKV_RUN_DIR": "/tmp/tandemkv-nowhere"}])
def test_sglang_alone_says_that_the_cache_rank_is_missing(variables: dict[str, str]) -> None:
    found = sglang_alone(variables)
    assert names_cache_rank(found), found
