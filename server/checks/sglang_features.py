# SPDX-License-Identifier: Apache-2.0
"""What of SGLang's own features can be served: adapters, drafts that are verified, watermarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sglang_args import value_of

from .model_files import check_weights_path

ALGORITHM = "--speculative-algorithm"
_WATERMARK = "--enable-watermark"
_LORA = "--lora-paths"
_LORA_FILES = ("adapter_config.json", "adapter_model.safetensors")


def check_adapters(sglang_args: Sequence[str]) -> None:
    """Refuse an adapter that is no folder with a configuration and safetensors.

    SGLang would look for its name in a model hub, or read pickled weights. ``--lora-paths`` has
    each adapter as ``PATH``, ``NAME=PATH`` or a JSON object. Raises `SettingsError`, naming the
    adapter and what to do.
    """
    for text in _adapters(sglang_args):
        folder = Path(_path_of(text)).expanduser()
        if not folder.is_dir():
            raise SettingsError(
                f"{_LORA} {text}: no such directory; give the folder of an adapter as NAME=PATH "
                "(nothing is downloaded)"
            )
        missing = [name for name in _LORA_FILES if not (folder / name).is_file()]
        if missing:
            raise SettingsError(
                f"{_LORA} {text}: it has no {' and no '.join(missing)}; give the folder that PEFT "
                "has saved an adapter in, as safetensors"
            )
        check_weights_path(folder, f"{_LORA} {text}")


def _adapters(args: Sequence[str]) -> list[str]:
    """Return the adapters; the last ``--lora-paths`` counts, as in SGLang's parser."""
    found: list[str] = []
    is_open = False
    for argument in args:
        name, has_value, value = argument.partition("=")
        if argument.startswith("--"):
            # `--lora` alone could be another argument, and is refused by SGLang's parser.
            is_open = len(name) > len("--lora-") and _LORA.startswith(name)
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
                f"{_LORA} {text}: no JSON object with lora_name and lora_path ({error})"
            ) from error
    return text.partition("=")[2] if "=" in text else text


def check_speculation(settings: ServeSettings, spec: ModelSpec) -> None:
    """Refuse speculative decoding, unless every layer attends to everything in one process.

    `check_sglang_args` has refused drafts of another model before. Raises `SettingsError`, with
    what to do.
    """
    if value_of(settings.sglang_args, ALGORITHM) is None:
        return
    policy = settings.selection.policy
    if not settings.selection.declared.all_exact:
        raise SettingsError(
            f"SGLang argument {ALGORITHM} cannot be passed with policy={policy}: drafts are "
            "verified by attention to everything; use --policy exact, or drop the argument"
        )
    if settings.cache_ranks != 0:
        raise SettingsError(
            f"SGLang argument {ALGORITHM} cannot be passed with "
            f"cache_ranks={settings.cache_ranks}: drafts of a lost pass cannot be taken back; use "
            "--cache-ranks 0"
        )
    if settings.evaluation:
        raise SettingsError(
            f"SGLang argument {ALGORITHM} cannot be passed with --evaluation, which chooses tokens "
            "one at a time; drop one of them"
        )
    if spec.other_layers:
        kind = "linear attention" if spec.linear_layers else "a sliding window"
        raise SettingsError(
            f"SGLang argument {ALGORITHM} cannot be passed with {spec.architecture}: drafts are "
            f"not verified in layers with {kind}; drop the argument"
        )


def check_watermark(settings: ServeSettings) -> None:
    """Refuse SGLang's watermark of answers where a lost pass is done again.

    SGLang has sampled in that pass, and the watermark goes by the tokens that were sampled. Raises
    `SettingsError`, with what to do.
    """
    is_marked = value_of(settings.sglang_args, _WATERMARK) is not None
    if is_marked and settings.cache_ranks != 0:
        raise SettingsError(
            f"SGLang argument {_WATERMARK} cannot be passed with "
            f"cache_ranks={settings.cache_ranks}: tokens of a lost pass stay in the watermark's "
            "context, and the answer would go on otherwise; use --cache-ranks 0"
        )
