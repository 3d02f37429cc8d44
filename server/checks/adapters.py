# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in SGLang's arguments, checked before anything is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import SettingsError

_FLAG = "--lora-paths"
_FILES = ("adapter_config.json", "adapter_model.safetensors")


def check_adapters(sglang_args: Sequence[str]) -> None:
    """Refuse an adapter that is no folder with a configuration and safetensors.

    SGLang would look for its name in a model hub, or read pickled weights. ``--lora-paths`` has
    each adapter as ``PATH``, ``NAME=PATH`` or a JSON object. Raises `SettingsError`, naming the
    adapter and what to do.
    """
    for text in _values(sglang_args):
        folder = Path(_path_of(text)).expanduser()
        if not folder.is_dir():
            raise SettingsError(
                f"{_FLAG} {text}: no such directory; give the folder of an adapter as NAME=PATH "
                "(nothing is downloaded)"
            )
        missing = [name for name in _FILES if not (folder / name).is_file()]
        if missing:
            raise SettingsError(
                f"{_FLAG} {text}: it has no {' and no '.join(missing)}; give the folder that PEFT "
                "has saved an adapter in, as safetensors"
            )


def _values(args: Sequence[str]) -> list[str]:
    """Return the adapters; the last ``--lora-paths`` counts, as in SGLang's parser."""
    found: list[str] = []
    is_open = False
    for argument in args:
        name, has_value, value = argument.partition("=")
        if argument.startswith("--"):
            # `--lora` alone could be another argument, and is refused by SGLang's parser.
            is_open = len(name) > len("--lora-") and _FLAG.startswith(name)
            if is_open:
                found = [value] if has_value else []
        elif is_open:
            found.append(argument)
    return found


def _path_of(text: str) -> str:
    if text.lstrip().startswith("{"):
        try:
            return str(json.loads(text)["lora_path"])
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"{_FLAG} {text}: no JSON object with lora_name and lora_path ({error})"
            ) from error
    return text.partition("=")[2] if "=" in text else text
