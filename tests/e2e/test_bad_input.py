# SPDX-License-Identifier: Apache-2.0
"""Bad input to the real command: one clear line, at once, and no traceback."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_servers import environment, model_dir

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def serve(*args: str, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Run ``tandemkv serve`` with arguments that must fail."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tandemkv.server", "serve", *args],
        env=environment() | (environ or {}),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd="/",
    )
    return done.returncode, done.stderr + done.stdout


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--budget-tokens", "20"], "budget_tokens"),
        (["--policy", "clairvoyant"], "clairvoyant"),
        (["--exact-layers", "0,99"], "exact_layers"),
        (["--cache-ranks", "3"], "cache_ranks"),
        (["--", "--speculative-algorithm", "EAGLE"], "speculative"),
        (["--host", "10.0.0.1"], "allow-remote"),
    ],
)
def test_one_clear_error(args: list[str], named: str) -> None:
    code, text = serve(model_dir(), *args)
    assert code != 0
    assert named in text, text
    assert "Traceback" not in text


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = serve(model_dir(), "--port", str(port))
    assert code != 0
    assert str(port) in text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "DeepseekV2ForCausalLM"),
        ({"use_sliding_window": True, "sliding_window": 512}, "sliding-window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_unsupported_models(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    config = json.loads((Path(model_dir()) / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(Path(model_dir()) / "tokenizer.json", tmp_path)
    code, text = serve(str(tmp_path))
    assert code != 0
    assert named in text
    assert "Traceback" not in text


def test_sglang_alone_with_our_backend_says_what_is_missing() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-W", "ignore", "-m", "sglang.launch_server"),
            *("--model-path", model_dir(), "--attention-backend", "tandemkv", "--device", "cpu"),
        ],
        env=environment() | {"SGLANG_PLUGINS": "tandemkv"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd="/",
    )
    assert done.returncode != 0
    assert "tandemkv" in done.stderr
