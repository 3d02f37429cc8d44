# SPDX-License-Identifier: Apache-2.0
"""SGLang's processes are copies only where a copy is whole, and load no tokenizer again."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandemkv.inference_rank.sglang import start_method

PROGRAM = """
import multiprocessing, threading, time
from types import SimpleNamespace
from tandemkv.inference_rank.sglang.start_method import choose_start_method
multiprocessing.set_start_method("spawn", force=True)
if {has_thread}:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
choose_start_method(None, SimpleNamespace(device={device!r}, skip_tokenizer_init=True))
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


SERVER_ARGS = SimpleNamespace(
    device="cpu", skip_tokenizer_init=False, tokenizer_path="/model", tokenizer_mode="auto",
    trust_remote_code=False, revision=None, tokenizer_backend="huggingface",
)  # fmt: skip


def test_what_was_loaded_for_copies_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[Any, ...]] = []

    def load(*args: Any, **kwargs: Any) -> object:
        loaded.append((*args, *kwargs))
        return object()

    def get(*args: Any, **kwargs: Any) -> Any:
        return start_method.around_get_tokenizer(load, *args, **kwargs)

    monkeypatch.setattr(start_method, "_tokenizers", {})
    monkeypatch.setattr("sglang.srt.managers.tokenizer_manager.get_tokenizer", get)
    monkeypatch.setattr(start_method.multiprocessing, "set_start_method", lambda *_, **__: None)
    options = {
        name: getattr(SERVER_ARGS, name)
        for name in ("revision", "tokenizer_backend", "tokenizer_mode", "trust_remote_code")
    }
    for threads, times in ((2, 0), (1, 1)):
        monkeypatch.setattr(start_method, "_num_threads", lambda found=threads: found)
        start_method.choose_start_method(None, SERVER_ARGS)
        assert len(loaded) == times
    assert get("/model", **options) is get("/model", **options)
    assert len(loaded) == 1
    get("/model", **options | {"tokenizer_mode": "slow"})
    get("/other", **options)
    assert len(loaded) == 3


@pytest.mark.parametrize(
    "module", ["detokenizer_manager", "scheduler", "tokenizer_manager", "tp_worker"]
)
def test_sglang_loads_its_tokenizers_as_they_were_loaded(module: str) -> None:
    spec = importlib.util.find_spec(f"sglang.srt.managers.{module}")
    assert spec is not None
    assert spec.origin is not None
    calls = [
        node
        for node in ast.walk(ast.parse(Path(spec.origin).read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "get_tokenizer"
    ]
    assert calls
    for call in calls:
        names = {word.arg for word in call.keywords}
        assert (len(call.args), names) == (1, set(start_method._TOKENIZER_ARGUMENTS))
