# SPDX-License-Identifier: Apache-2.0
"""What `bench decode` compares: a table from names to flags, settings and environment.

Stock SGLang and ours run the same program on the same GPUs; they differ by what stands here.
A YAML file (``--configurations``) adds to the table or replaces entries of it::

    in-process-tp1-k512:
      settings: {cache_ranks: 0, device: cuda, selection.budget_tokens: 512}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tandemkv.cache_rank.policies.registry import resolve_selection
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.server.evaluation.grid import explained, read_grid, read_yaml
from tandemkv.server.launch.sglang_command import sglang_argv, sglang_env
from tandemkv.server.plan.pages import LONG_PAGE_TOKENS, on_device
from tandemkv.server.plan.placement_choice import with_late_layers
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sources import Sourced, load_settings

from .report import check_name

_DENSE_FLAGS = ("--device", "cuda", "--dtype", "bfloat16", "--attention-backend", "flashinfer")
_SERVER_MODULE = "sglang.launch_server"


class Configuration(BaseModel):
    """One side of a comparison.

    `settings` are dotted settings of ``tandemkv serve``, and SGLang gets the flags that `serve`
    would give it; without any, no plugin is loaded and the run is stock SGLang. `flags` are
    further ones of SGLang's, `env` is added to the environment last.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tp_size: int = Field(default=1, ge=1, le=64)
    flags: tuple[str, ...] = ()
    settings: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    index_channels: int | None = Field(default=None, ge=1)
    """Channels of each key that an index has, in a file that is made for dummy weights."""
    is_reference: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.is_reference and self.settings:
            raise ValueError("a reference is stock SGLang: it takes no settings of tandemkv")
        if self.index_channels and not self.settings:
            raise ValueError("index_channels: stock SGLang has no index; add settings")
        return self

    @property
    def is_stock(self) -> bool:
        """Whether SGLang runs without the plugin."""
        return not self.settings

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        is_cpu = self.settings.get("device") == "cpu" or "cpu" in self.flags
        return "cpu" if is_cpu else "cuda"

    @property
    def has_cache_gpu(self) -> bool:
        """Whether cache ranks are processes of this host, each with a GPU of its own."""
        is_shared = self.settings.get("transport", "shared") == "shared"
        return is_shared and bool(self.settings.get("cache_ranks")) and self.device == "cuda"

    def sglang_flags(self, settings: ServeSettings) -> list[str]:
        """Return SGLang's flags; of ours, those that ``tandemkv serve`` gives with `settings`."""
        if self.is_stock:
            return [*self.flags, "--tp-size", str(self.tp_size)]
        dtype = settings.dtype
        if dtype == "auto":
            dtype = "float32" if self.device == "cpu" else "bfloat16"
        argv = sglang_argv(
            settings,
            model_dir=Path(settings.model),
            device=self.device,
            dtype=dtype,
            port=settings.port,
        )
        return [*argv[argv.index(_SERVER_MODULE) + 1 :], *self.flags]

    def serve_settings(self, *, model_dir: Path, capacity_tokens: int, batch: int) -> ServeSettings:
        """Return the settings that ours runs with.

        Raises `SettingsError` if this version does not know one of them, or refuses it.
        """
        given: dict[str, Any] = {
            "cache.capacity_tokens": capacity_tokens,
            "max_running_requests": batch,
            **self.settings,
            "model": str(model_dir),
        }
        if self.tp_size > 1 and self.settings:
            given["tensor_parallel"] = self.tp_size
        sourced = {key: Sourced(value, "bench") for key, value in given.items()}
        return with_late_layers(load_settings(sourced, {}))

    def child_env(self, settings: ServeSettings, run_dir: Path) -> dict[str, str]:
        """Return the environment of the child process."""
        env = sglang_env(settings, os.environ, run_dir=run_dir, device=self.device)
        if self.is_stock:
            env = {
                key: text
                for key, text in env.items()
                if not key.startswith("TANDEMKV_") and key != "SGLANG_PLUGINS"
            }
        return {**env, **self.env}


def _own(tp_size: int, *, index_channels: int | None = None, **more: Any) -> Configuration:
    settings = {
        "cache_ranks": 0,
        "device": "cuda",
        "dtype": "bfloat16",
        "selection.index_dtype": "int4",
        # Those of the published figures; `-served` has what is served by default.
        "selection.budget_tokens": 2048,
        "selection.resident_factor": 2.0,
        "selection.fetch_cap": 128,
        "selection.num_recent_tokens": LONG_PAGE_TOKENS,
        "selection.exact_layers": [],
        "selection.sample_tokens": 0,
        # Below it ours is dense attention; a benchmark wants to see what selecting costs.
        "selection.dense_tokens": 0,
        **more,
    }
    return Configuration(tp_size=tp_size, settings=settings, index_channels=index_channels)


_OF_GRID = (
    *("policy", "budget_tokens", "resident_factor", "num_sink_tokens", "num_recent_tokens"),
    *("index_dtype", "pool_before", "pool_after"),
)
_SERVED = SelectionSettings()
_AS_SERVED: Mapping[str, Any] = {
    "selection.budget_tokens": _SERVED.budget_tokens,
    "selection.resident_factor": _SERVED.resident_factor,
    "selection.fetch_cap": None,
    "selection.sample_tokens": None,
    "stress_selection": True,
}
_FP8_KV = {"cache.kv_dtype": "fp8_e4m3"}
_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "-exact01": {"selection.exact_layers": [0, 1]},
    "-int8": {"selection.index_dtype": "int8"},
    "-async-spade": {"selection.policy": "async_spade"},
    "-samples": {"selection.sample_tokens": 128},
    "-served": _AS_SERVED,
    # An index of 64 channels, half of those of the models that are measured.
    "-served-channels64": {**_AS_SERVED, "index_channels": 64},
    "-served-fp8kv": {**_AS_SERVED, **_FP8_KV},
    "-late0": {"selection.late_layers": 0},
    # Dummy weights give queries that hardly move; here every step fetches all it may.
    "-stress": {"stress_selection": True},
    "-no-selection": {
        "selection.policy": "streaming",
        "selection.budget_tokens": 0,
        "selection.num_recent_tokens": 4224,
    },
    "-exact": {"selection.policy": "exact"},
    "-fp8kv": _FP8_KV,
}
"""What is varied. ``-no-selection`` attends to as many tokens as K = 2048 and c = 2 do, twice as
many as the defaults, but never chooses any."""


BUILT_IN: Mapping[str, Configuration] = {
    **{
        f"dense-tp{size}{name}": Configuration(
            tp_size=size, flags=(*_DENSE_FLAGS, *more), is_reference=True
        )
        for name, more in {"": (), "-fp8kv": ("--kv-cache-dtype", "fp8_e4m3")}.items()
        for size in (1, 2, 4, 8)
    },
    **{
        f"in-process-tp{size}{name}": _own(size, **more)
        for size in (1, 2, 4, 8)
        for name, more in _VARIANTS.items()
    },
    **{
        f"1+{count}-{link}{name}": _own(1, cache_ranks=count, transport=link, **more)
        for count in (1, 2, 3, 7)
        for link in ("shared", "message")
        for name, more in _VARIANTS.items()
    },
}


def load_configurations(path: Path | None) -> dict[str, Configuration]:
    """Return the built-in table with what a YAML file adds or replaces.

    Raises `SettingsError` if the file cannot be read or an entry is wrong.
    """
    table = dict(BUILT_IN)
    if path is None:
        return table
    entries = read_yaml(path, "--configurations")
    if not isinstance(entries, dict):
        raise SettingsError(f"--configurations {path}: a mapping from names is required")
    for name, entry in entries.items():
        check_name(str(name))
        try:
            table[str(name)] = Configuration.model_validate(entry)
        except ValidationError as error:
            why = explained(error, "settings")
            raise SettingsError(f"--configurations {path}: {name}.{why}") from None
    return table


def from_grid(path: Path) -> dict[str, Configuration]:
    """Return a configuration on one GPU for each setting of a grid, by ``grid-`` and its name.

    Queries jump, so that every step fetches all it may: dummy weights would hide what a cap costs.
    Raises `SettingsError` if the file or one of its settings is wrong, or no figure can be named by
    a setting, as by a policy of your own.
    """
    found = {}
    for name, values in read_grid(path, "cuda").items():
        check_name(f"grid-{name}")
        selection = on_device(resolve_selection(values), "cuda")
        given = {f"selection.{key}": getattr(selection, key) for key in _OF_GRID} | {
            "selection.sample_tokens": selection.num_samples,
            "selection.exact_layers": list(selection.exact_layer_ids),
            "selection.fetch_cap": selection.fetch_cap_tokens,
            "stress_selection": not selection.declared.keeps_sink_only,
        }
        found[f"grid-{name}"] = _own(1, **given)
    return found


def pick(table: Mapping[str, Configuration], names: list[str]) -> dict[str, Configuration]:
    """Return the named configurations in this order.

    Raises `SettingsError` if a name is unknown or given twice.
    """
    unknown = [name for name in names if name not in table]
    if unknown:
        raise SettingsError(
            f"configuration {', '.join(unknown)} is unknown; known: {', '.join(table)}"
        )
    if len(set(names)) != len(names):
        raise SettingsError("a configuration is named twice; name each once")
    return {name: table[name] for name in names}
