# SPDX-License-Identifier: Apache-2.0
"""What the plugin holds in SGLang's scheduler process, and where its hooks find it.

There is one runtime per process, entered with the attention backend. Hooks that run before
that, or in processes without a model (HTTP server), see None and do nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.messages import StatusReply
from tandemkv.cache_rank.protocol.models.index_channels import num_index_channels
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.rank_settings import (
    NODES_VARIABLE,
    RUN_DIR_VARIABLE,
    SETTINGS_VARIABLE,
    RankSettings,
)
from tandemkv.inference_rank.sglang.pool import Occupancy

from .counters import Counters
from .refresh import RefreshSchedule


@dataclass(slots=True, kw_only=True)
class Runtime:
    """What hooks find of an inference rank, wherever its engine is."""

    settings: RankSettings
    model: ModelSpec
    counters: Counters
    resident_bytes: int
    """Of its resident sets."""
    occupancy: Occupancy
    middle_chunk_row: int | None = None
    """Row of the request in the present pass whose prompt does not end in it."""
    rows_on_host: list[int] | None = None
    """Rows of the pass that is being made; None if it is not SGLang's scheduler that makes it."""
    running_reqs: list[Any] = field(default_factory=list)
    running_lengths: list[int] = field(default_factory=list)
    refresh: RefreshSchedule = field(default_factory=RefreshSchedule)
    index_channels: int | None = field(init=False)
    """Channels of each key that the index has; None for all."""

    def __post_init__(self) -> None:
        """Read how many channels the file names; nobody asks for it again."""
        self.index_channels = num_index_channels(self.settings.selection)

    def reply(
        self, *, epoch: int, ready: bool, values: dict[str, float], info: dict[str, str]
    ) -> StatusReply:
        """Return the answer to a `StatusRequest`: what every inference rank has, and the rest."""
        selection = self.settings.selection
        values = self.counters.as_values() | {
            "resident_bytes": float(self.resident_bytes),
            "resident_slots": float(selection.num_resident),
            "ring_slots": float(selection.num_recent_tokens),
            **self.occupancy.values(),
            **values,
        }
        channels, calibrated = self.index_channels, dict[str, str]()
        if channels is not None:
            calibrated["index_channels"] = f"{channels} of {self.model.head_dim}"
        if selection.declared.predictor:
            calibrated["predictor"] = Path(selection.declared.predictor).name
        info = {
            "policy": selection.policy,
            "budget_tokens": str(selection.budget_tokens),
            "sample_tokens": str(selection.num_samples),
            "exact_layers": ",".join(map(str, selection.exact_layer_ids)) or "none",
            "windowed_layers": ",".join(map(str, self.model.windowed_layers)) or "none",
            "linear_layers": ",".join(map(str, self.model.linear_layers)) or "none",
            "late_layers": str(selection.num_late),
            **self.settings.placement.info(),
            "index_dtype": selection.index_dtype,
            **calibrated,
            "model": self.model.architecture,
            "pid": str(os.getpid()),
            **info,
        }
        return StatusReply(
            role="inference_rank", epoch=epoch, ready=ready, values=values, info=info
        )


_current: Any = None


def current() -> Any:
    """Return the runtime of this process, a `LocalRuntime` or a `SharedRuntime`, if it has one."""
    return _current


def set_current(runtime: Any) -> None:
    """Enter this process's runtime."""
    global _current
    _current = runtime


def noted(note: Callable[..., None]) -> Callable[..., None]:
    """Return a BEFORE or AFTER hook, ``note(runtime, *args)`` once there is a runtime."""

    def hook(*args: Any, **_: Any) -> None:
        if (runtime := current()) is not None:
            note(runtime, *args)

    return hook


def around(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return an AROUND hook, ``hook(runtime, original, *args)`` once there is a runtime."""

    def pass_on(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        runtime = current()
        if runtime is None:
            return original(*args, **kwargs)
        return hook(runtime, original, *args, **kwargs)

    return pass_on


def settings_from_environment() -> RankSettings:
    """Return the settings that the launcher handed over.

    Raises `SettingsError` if the variable is missing or does not validate; the field is named.
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

    Raises `SettingsError` if the variable is missing.
    """
    path = os.environ.get(RUN_DIR_VARIABLE)
    if not path:
        raise SettingsError(f"{RUN_DIR_VARIABLE} is not set; start with `tandemkv serve`")
    return RunDir.open(Path(path))


def nodes_from_environment() -> LinkAddress | None:
    """Return where SGLang's processes of several hosts meet; None if all are on this one.

    Raises `SettingsError` if it is no address.
    """
    text = os.environ.get(NODES_VARIABLE)
    return LinkAddress.parse_node(text) if text else None
