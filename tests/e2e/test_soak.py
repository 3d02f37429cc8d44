# SPDX-License-Identifier: Apache-2.0
"""Ninety seconds of ``tandemkv soak``: mixed load, kills, stops, delays and lost messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rank_servers import environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SERVE = (
    *("--transport", "shared", "--max-running-requests", "8", "--cache-tokens", "8192"),
    *("--max-context", "2048", "--budget-tokens", "96", "--recent-tokens", "16"),
    *("--resident-factor", "1", "--fetch-cap", "8"),
)


def test_ninety_seconds_of_load_and_faults_leave_a_server_as_it_was(tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    argv = [
        *(sys.executable, "-P", "-m", "tandemkv.server", "soak", "smollm2", "--duration", "90"),
        *("--seed", "25", "--calm", "15", "--json", str(report)),
        # More than by default: another test computes on the same two cores.
        *("--ready-within", "120", "--refused-within", "10"),
        *("--expect-no-loss", "--", *SERVE),
    ]
    done = subprocess.run(
        argv, env=environment(), capture_output=True, text=True, check=False, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["passed"]
    assert found["faults"]
    assert found["endings"]["answered"] > 20
