# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in SGLang's arguments: folders with safetensors, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.checks.sglang_features import check_adapters
from tandemkv.server.settings.sglang_args import check_sglang_args


def write_adapter(folder: Path) -> Path:
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).touch()
    return folder


def test_adapters_are_passed_on(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    as_json = json.dumps({"lora_name": "x", "lora_path": str(path)})
    for arguments in (
        [],
        ["--enable-lora", "--max-lora-rank", "16", "--lora-target-modules", "q_proj"],
        ["--lora-paths", str(path), f"name={path}", as_json, "--log-level", "debug"],
        [f"--lora-paths=name={path}"],
        ["--lora-p", str(path)],
        ["--lora-paths", "/nowhere", "--lora-paths", str(path)],  # the last one counts
        ["--lora-backend", "triton"],
    ):
        check_adapters(arguments)
        check_sglang_args(arguments, device="cpu")


def test_what_is_no_folder_of_safetensors_is_refused(tmp_path: Path) -> None:
    good = str(write_adapter(tmp_path / "good"))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_config.json").touch()
    (pickled / "adapter_model.bin").touch()
    for arguments, words in (
        (["--lora-paths", good, "org/name"], "org/name: no such directory.*nothing is downloaded"),
        (["--lora-paths=x=/nowhere"], "x=/nowhere: no such directory"),
        (["--lora-paths", str(pickled)], "it has no adapter_model.safetensors.*as safetensors"),
        (["--lora-paths", str(tmp_path)], "no adapter_config.json and no adapter_model"),
        (["--lora-paths", str(write_adapter(tmp_path / "a[1]"))], "SGLang takes .* for a pattern"),
        (["--lora-paths", '{"lora_path": 1'], "no JSON object with lora_name"),
        (["--lora-paths", '{"name": 1}'], "no JSON object with lora_name"),
    ):
        with pytest.raises(SettingsError, match=words):
            check_adapters(arguments)
