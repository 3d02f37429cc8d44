# SPDX-License-Identifier: Apache-2.0
"""Declare torchvision's operators where its compiled library cannot be loaded.

Runs at the start of every interpreter of the environment (tandemkv_cpu_shim.pth), also in spawned
ones, so it imports nothing but the standard library until torchvision is asked for.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept_alive: list[object] = []  # an operator library's declarations die with it


class _DeclareTorchvisionOps(importlib.abc.MetaPathFinder):
    """Waits for the first import of torchvision, acts once, and leaves finding it to others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Declare the operators if this is torchvision; find nothing in any case."""
        if fullname == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            import torch

            if not torch.version.cuda:
                library = torch.library.Library("torchvision", "FRAGMENT")
                for schema in _SCHEMAS:
                    library.define(schema)
                _kept_alive.append(library)
        return None


sys.meta_path.insert(0, _DeclareTorchvisionOps())
