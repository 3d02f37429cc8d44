# SPDX-License-Identifier: Apache-2.0
"""What an epoch is built from and the next one may use again: store, weights, rotary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from .calibration.resolve import resolve_calibration
from .counters import Counters
from .device_memory import check_device_memory
from .host_memory import check_memory
from .model_adapters.base import ModelAdapter
from .model_adapters.registry import find_adapter
from .model_adapters.rotary import read_rotary
from .policies.base import Policy, PolicyContext, Rotary
from .policies.registry import check_pooling, check_resolved, find_policy
from .protocol.errors import SettingsError
from .protocol.messages import Timing
from .protocol.model_spec import (
    KV_DTYPES,
    ModelSpec,
    model_as_claimed,
    read_config,
    read_model_spec,
)
from .protocol.settings import RankSettings
from .store import KVStore

_CPU = torch.device("cpu")


class Resources:
    """Makes and keeps the large things. Used from the service thread only.

    Parameters
    ----------
    model_dir : Path
        Directory of the model.
    settings : RankSettings
        The settings of both ranks.
    counters : Counters
        For the store.
    device : torch.device
        Where store, weights and what policies keep are.

    Raises
    ------
    UnsupportedModelError, PolicyError
        If the model or the policy cannot be served.
    CalibrationError
        If the policy needs a calibration that there is not, or that is of another model.
    SettingsError
        If the host or the GPU has too little memory for the store, or the policy does not run
        there.
    """

    def __init__(
        self,
        model_dir: Path,
        settings: RankSettings,
        counters: Counters,
        device: torch.device = _CPU,
    ) -> None:
        self.device = device
        self._model_dir = model_dir
        self._settings = settings
        self._counters = counters
        self._store: KVStore | None = None
        self._store_dtype = ""
        self._adapter: ModelAdapter | None = None
        self._adapter_dtype = ""
        config = read_config(model_dir)
        saved = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        dtype = saved if saved in KV_DTYPES else "float32"
        self.model = read_model_spec(model_dir, dtype=dtype)
        policy_class = find_policy(settings.selection.policy)
        check_resolved(policy_class, settings.selection)
        check_pooling(policy_class, settings.selection)
        self.capabilities = policy_class.capabilities
        if device.type not in self.capabilities.devices:
            raise SettingsError(
                f"policy={settings.selection.policy} does not run on {device.type}; use one that "
                f"does, or --cache-device {self.capabilities.devices[0]}"
            )
        if settings.selection.index_dtype == "int4":
            raise SettingsError(
                "index_dtype=int4: a cache rank in a process of its own has no such index; use "
                "--index-dtype int8"
            )
        self._check_memory(self.model, num_slots=settings.cache.capacity_tokens)
        calibrated = resolve_calibration(settings.selection, self.model, self.capabilities)
        self.calibration_origin = calibrated.origin
        self._context = PolicyContext(
            model=self.model,
            selection=settings.selection,
            rotary=self._rotary() if self.capabilities.selects else None,
            share=calibrated.share,
            clusters=calibrated.clusters,
        )
        self.policy(self.model)  # a policy that cannot be built is told now

    def model_of(self, claimed: ModelSpec) -> ModelSpec:
        """Return our model with the KV dtype and context that the inference rank was given.

        Raises
        ------
        ProtocolError
            If the dtype is none that KV is kept in.
        """
        return model_as_claimed(self.model, claimed)

    def store(self, model: ModelSpec, page_size: int) -> KVStore:
        """Return an empty store with room for SGLang's slot ids.

        They run from 1 to `capacity_tokens`; a page is added for the padding slot 0.

        Raises
        ------
        SettingsError
            If the host has too little memory.
        """
        cache = self._settings.cache
        num_slots = cache.capacity_tokens + page_size
        if (
            self._store is not None
            and self._store_dtype == model.dtype
            and self._store.num_slots == num_slots
        ):
            self._store.clear()
            return self._store
        self._store = None  # given back before the new one is made
        self._check_memory(model, num_slots=num_slots)
        self._store_dtype = model.dtype
        self._store = KVStore(
            model,
            num_slots=num_slots,
            index_dtype=self._settings.selection.index_dtype,
            poison=cache.poison_freed_slots,
            counters=self._counters,
            device=self.device,
        )
        return self._store

    def _check_memory(self, model: ModelSpec, *, num_slots: int) -> None:
        check = check_memory if self.device.type == "cpu" else check_device_memory
        check(model, self._settings, num_slots=num_slots)

    def _rotary(self) -> Rotary:
        found = read_rotary(self._model_dir)
        return replace(found, inv_freq=found.inv_freq.to(self.device))

    def policy(self, model: ModelSpec) -> Policy:
        """Return a fresh policy, which remembers nothing."""
        policy_class = find_policy(self._settings.selection.policy)
        return policy_class(replace(self._context, model=model))

    def predictor(self, model: ModelSpec) -> ModelAdapter | None:
        """Return the model adapter if the policy's timing needs one."""
        if self.capabilities.timing is not Timing.SAME_STEP_HIDDEN:
            return None
        if self._adapter is None or self._adapter_dtype != model.dtype:
            adapter_class = find_adapter(model.architecture)
            exact = self._settings.selection.exact_layer_ids
            self._adapter = adapter_class(
                self._model_dir,
                model,
                layers=[layer for layer in range(model.num_layers) if layer not in exact],
                rotary=self._context.rotary,
                device=self.device,
            )
            self._adapter_dtype = model.dtype
        return self._adapter
