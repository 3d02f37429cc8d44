"""Lets stock SGLang start on a machine without CUDA; loaded by a .pth file in every interpreter.

The torchvision wheel on the package index is built for CUDA: over a CPU build of torch its
C++ operators cannot be loaded, and importing it fails where it registers fake versions of
operators that do not exist. The schemas of those two are declared just before torchvision is
imported. Costs nothing (torch is not imported) until somebody imports torchvision.
"""

import importlib.abc
import sys


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        import torch

        if not torch.version.cuda:
            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
            sys.modules["_tandemkv_torchvision_library"] = library  # keeps it alive
        return None


sys.meta_path.insert(0, _DeclareOperators())
