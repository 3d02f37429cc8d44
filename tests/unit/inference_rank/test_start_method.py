# SPDX-License-Identifier: Apache-2.0
"""SGLang's processes are copies only where a copy is whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing, threading, time
from types import SimpleNamespace
from tandemkv.inference_rank.sglang.start_method import choose_start_method
multiprocessing.set_start_method("spawn", force=True)
if {has_thread}:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
choose_start_method(None, SimpleNamespace(device={device!r}))
print(multiprocessing.get_start_method())
"""


@pytest.mark.parametrize(
    ("device", "has_thread", "method"),
    [("cpu", False, "fork"), ("cpu", True, "spawn"), ("cuda", False, "spawn")],
)
def test_copies_on_a_cpu_and_of_a_process_with_one_thread(
    device: str, has_thread: bool, method: str
) -> None:
    program = PROGRAM.format(device=device, has_thread=has_thread)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [method]
