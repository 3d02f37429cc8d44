# SPDX-License-Identifier: Apache-2.0
"""What the plugin holds in SGLang's scheduler process, and where its hooks find it.

There is one runtime per process, entered with the attention backend. Hooks that run before
that, or in processes without a model (HTTP server), see None and do nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings import (
    RUN_DIR_VARIABLE,
    SETTINGS_VARIABLE,
    RankSettings,
)

from .refresh import Vocabulary

_current: Any = None


def current() -> Any:
    """Return the runtime of this process, a `LocalRuntime` or a `SharedRuntime`, if it has one."""
    return _current


def set_current(runtime: Any) -> None:
    """Enter this process's runtime."""
    global _current
    _current = runtime


def settings_from_environment() -> RankSettings:
    """Return the settings that the launcher handed over.

    Raises
    ------
    SettingsError
        If the variable is missing or does not validate; the field is named.
    """
    text = os.environ.get(SETTINGS_VARIABLE)
    if not text:
        raise SettingsError(
            f"{SETTINGS_VARIABLE} is not set; start the server with `tandemkv serve` or `tandemkv "
            "inference-rank`, which set it"
        )
    try:
        return RankSettings.model_validate_json(text)
    except ValueError as error:
        raise SettingsError(f"{SETTINGS_VARIABLE}: {error}") from error


def run_dir_from_environment() -> RunDir:
    """Return the private directory that both ranks share.

    Raises
    ------
    SettingsError
        If the variable is missing.
    """
    path = os.environ.get(RUN_DIR_VARIABLE)
    if not path:
        raise SettingsError(f"{RUN_DIR_VARIABLE} is not set; start with `tandemkv serve`")
    return RunDir.open(Path(path))


def tokenizer_of(model_path: str) -> Vocabulary:
    """Load the tokenizer of a model."""
    from transformers import AutoTokenizer

    tokenizer: Vocabulary = AutoTokenizer.from_pretrained(model_path)
    return tokenizer
