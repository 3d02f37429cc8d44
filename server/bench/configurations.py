# SPDX-License-Identifier: Apache-2.0
"""What `bench decode` compares: a table from names to flags, settings and environment.

Stock SGLang and ours run the same program on the same GPUs; they differ by what stands here.
A YAML file (``--configurations``) adds to the table or replaces entries of it::

    in-process-tp1-k512:
      tp_size: 1
      settings: {cache_ranks: 0, selection.budget_tokens: 512}
      flags: [--attention-backend, tandemkv]
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.settings import ServeSettings
from tandemkv.server.settings_sources import Sourced, load_settings
from tandemkv.server.sglang_command import sglang_env

_CUDA_FLAGS = ("--device", "cuda", "--dtype", "bfloat16")
_DENSE_FLAGS = (*_CUDA_FLAGS, "--attention-backend", "flashinfer")
_OWN_FLAGS = (*_CUDA_FLAGS, "--attention-backend", "tandemkv", "--page-size", "1")


class Configuration(BaseModel):
    """One side of a comparison.

    `settings` are dotted settings of ``tandemkv serve``; without any, no plugin is loaded and
    the run is stock SGLang. `flags` are SGLang's, `env` is added to the environment last.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tp_size: int = Field(default=1, ge=1, le=64)
    flags: tuple[str, ...] = ()
    settings: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    is_reference: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.is_reference and self.settings:
            raise ValueError("a reference is stock SGLang: it takes no settings of tandemkv")
        return self

    def sglang_flags(self) -> tuple[str, ...]:
        """Return SGLang's flags with the size of tensor parallelism."""
        return (*self.flags, "--tp-size", str(self.tp_size))

    def serve_settings(self, *, model_dir: Path, capacity_tokens: int) -> ServeSettings:
        """Return the settings that ours runs with.

        Raises
        ------
        SettingsError
            If this version does not know one of them, or refuses it.
        """
        given = {"cache.capacity_tokens": capacity_tokens, **self.settings, "model": model_dir}
        return load_settings(
            {key: Sourced(str(v) if key == "model" else v, "bench") for key, v in given.items()}, {}
        )

    def child_env(self, *, model_dir: Path, run_dir: Path, capacity_tokens: int) -> dict[str, str]:
        """Return the environment of the child process.

        Raises
        ------
        SettingsError
            As `serve_settings`.
        """
        is_cpu = "cpu" in self.flags
        settings = self.serve_settings(model_dir=model_dir, capacity_tokens=capacity_tokens)
        env = sglang_env(settings, os.environ, run_dir=run_dir, device="cpu" if is_cpu else "cuda")
        if not self.settings:
            env = {
                key: text
                for key, text in env.items()
                if not key.startswith("TANDEMKV_") and key != "SGLANG_PLUGINS"
            }
        env["BENCH_LOAD_PLUGINS"] = "1" if self.settings else "0"
        return {**env, **self.env}


def _own(tp_size: int, **selection: Any) -> Configuration:
    chosen = {f"selection.{name}": value for name, value in selection.items()}
    settings = {"cache_ranks": 0, "exchange.transport": "local", **chosen}
    return Configuration(tp_size=tp_size, flags=_OWN_FLAGS, settings=settings)


BUILT_IN: Mapping[str, Configuration] = {
    **{
        f"dense-tp{size}": Configuration(tp_size=size, flags=_DENSE_FLAGS, is_reference=True)
        for size in (1, 2, 4, 8)
    },
    **{
        f"in-process-tp{size}": _own(size, index_dtype="int4", exact_layers=[0, 1])
        for size in (1, 2, 4, 8)
    },
}


def load_configurations(path: Path | None) -> dict[str, Configuration]:
    """Return the built-in table with what a YAML file adds or replaces.

    Raises
    ------
    SettingsError
        If the file cannot be read or an entry is wrong.
    """
    table = dict(BUILT_IN)
    if path is None:
        return table
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise SettingsError(f"--configurations {path}: cannot be read ({detail})") from error
    if not isinstance(entries, dict):
        raise SettingsError(f"--configurations {path}: a mapping from names is required")
    for name, entry in entries.items():
        try:
            table[str(name)] = Configuration.model_validate(entry)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise SettingsError(f"--configurations {path}: {name}.{key}: {first['msg']}") from None
    return table


def pick(table: Mapping[str, Configuration], names: list[str]) -> dict[str, Configuration]:
    """Return the named configurations in this order.

    Raises
    ------
    SettingsError
        If a name is unknown or given twice.
    """
    unknown = [name for name in names if name not in table]
    if unknown:
        raise SettingsError(
            f"configuration {', '.join(unknown)} is unknown; known: {', '.join(table)}"
        )
    if len(set(names)) != len(names):
        raise SettingsError("a configuration is named twice; name each once")
    return {name: table[name] for name in names}
