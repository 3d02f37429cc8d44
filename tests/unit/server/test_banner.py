# SPDX-License-Identifier: Apache-2.0
"""What is printed once the server is ready."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from tandemkv.cache_rank.protocol.settings.placement import Link, Placement
from tandemkv.server.cli.start_view import StartProgress
from tandemkv.server.launch.serve import banner
from tandemkv.server.settings.launch_settings import ServeSettings


@pytest.mark.parametrize(
    ("budget_tokens", "sample_tokens", "told"),
    [
        (896, None, "K = 896 tokens and 1024 samples per KV head, exact layers none"),
        (512, None, "K = 512 tokens and 512 samples per KV head, exact layers none"),
        (896, 0, "K = 896 tokens and 0 samples per KV head, exact layers 0,1"),
    ],
)
def test_the_banner_says_what_a_head_attends_to(
    budget_tokens: int, sample_tokens: int | None, told: str
) -> None:
    settings = ServeSettings.model_validate(
        {
            "model": "smollm2",
            "placement": Placement(),
            "selection": {"budget_tokens": budget_tokens, "sample_tokens": sample_tokens},
        }
    )
    text = banner(settings, "http://127.0.0.1:30000", Path("/run/here"))
    assert told in text
    assert "http://127.0.0.1:30000/v1/chat/completions" in text


def test_the_banner_asks_with_the_key(tmp_path: Path) -> None:
    settings = ServeSettings.model_validate(
        {"model": "smollm2", "placement": Placement(), "edge": {"api_key_file": tmp_path / "a key"}}
    )
    text = banner(settings, "http://127.0.0.1:30000", Path("/run/here"))
    assert f"-H \"Authorization: Bearer $(cat '{tmp_path}/a key')\" \\\n" in text
    assert "Bearer" not in banner(ServeSettings(model="smollm2"), "http://h:1", Path("/run/here"))


@pytest.mark.parametrize(
    ("args", "name"),
    [((), "smollm2"), (("--served-model-name", "mine"), "mine"), (("--served-model=x",), "x")],
)
def test_the_banner_asks_for_the_model_that_sglang_serves(args: tuple[str, ...], name: str) -> None:
    settings = ServeSettings(model="smollm2", placement=Placement(), sglang_args=args)
    text = banner(settings, "http://127.0.0.1:30000", Path("/run/here"))
    assert f'-d \'{{"model": "{name}",' in text


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "it's [fp8]"
    settings = ServeSettings(model=str(folder), placement=Placement())
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(banner(settings, "http://[fd00::1]:30000", Path("/run/[me]")))
    with StartProgress(console).stage(f"model {folder}"):
        pass
    text = console.export_text()
    assert "logs in /run/[me])" in text
    assert f"model {folder} " in text
    curl = text[text.index("curl ") : text.index("  tandemkv status")].replace("\\\n", "")
    assert json.loads(shlex.split(curl)[-1])["model"] == "it's [fp8]"


@pytest.mark.parametrize(("link", "stopped"), [("shared", "both ranks"), ("local", "the server")])
def test_the_banner_says_what_ctrl_c_ends(link: Link, stopped: str) -> None:
    settings = ServeSettings(model="smollm2", placement=Placement(link=link))
    text = banner(settings, "http://127.0.0.1:30000", Path("/run/here"))
    assert text.endswith(f"Ctrl-C stops {stopped}.")
