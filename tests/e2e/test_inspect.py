# SPDX-License-Identifier: Apache-2.0
"""`tandemkv inspect` from the command line, with real servers."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rank_servers import environment, model_dir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
SMALL = ("--budget-tokens", "96", "--recent-tokens", "16", "--resident-factor", "1")


def run(folder: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    prompt = folder / "prompt.txt"
    prompt.write_text(text)
    argv = [
        *(sys.executable, "-P", "-m", "tandemkv.server", "inspect", model_dir()),
        *("--prompt-file", str(prompt), "--out", str(folder / "page.html")),
        *("--max-new-tokens", "8", *SMALL, *flags),
    ]
    return subprocess.run(argv, env=environment(), cwd="/", capture_output=True, text=True)


def test_a_page_of_a_prompt(tmp_path: Path) -> None:
    topics = importlib.import_module("pydoc_data.topics").topics
    done = run(tmp_path, topics["assignment"][:2500])
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "page.html").read_text()
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])
    assert "".join(data["tokens"])[:40] == topics["assignment"][:40]
    assert len(data["lengths"]) == 7  # the first of 8 new tokens is prefill's
    assert data["layers"] == list(range(2, 30))
    assert all(chosen is not None for step in data["selected"] for chosen in step)
    assert all(0.2 < mass <= 1.0 for step in data["mass"] for layer in step for mass in layer)


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [("short", (), "longer prompt"), ("x " * 400, ("--policy", "streaming"), "nothing to look at")],
)
def test_nothing_to_show(tmp_path: Path, text: str, flags: tuple[str, ...], message: str) -> None:
    done = run(tmp_path, text, *flags)
    assert done.returncode == 2
    assert message in done.stderr
