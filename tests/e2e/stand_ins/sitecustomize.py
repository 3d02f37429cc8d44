# SPDX-License-Identifier: Apache-2.0
"""Lets the servers of a test run gated delta nets on a CPU without AMX.

Python imports this at its start if its folder is in ``PYTHONPATH``. What it does is done when
SGLang imports the kernels that such a CPU has none of, or a model that looks for some of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_KERNELS, _MODEL = "sgl_kernel.mamba", "sglang.srt.models.qwen3_5"


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == _MODEL:
            import linear_without_a_gpu

            linear_without_a_gpu.install_operators()
            return None
        return importlib.machinery.ModuleSpec(name, self) if name == _KERNELS else None

    def create_module(self, _spec: importlib.machinery.ModuleSpec) -> ModuleType:
        import linear_without_a_gpu
        import sglang_without_a_gpu

        sglang_without_a_gpu.install()
        linear_without_a_gpu.install()
        return sys.modules[_KERNELS]

    def exec_module(self, _module: ModuleType) -> None:
        """It is complete."""


sys.meta_path.insert(0, _StandIns())
