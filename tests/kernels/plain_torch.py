# SPDX-License-Identifier: Apache-2.0
"""Operations in plain torch on any device: what Triton kernels are compared with."""

from __future__ import annotations

from importlib import import_module
from inspect import isfunction
from types import SimpleNamespace
from typing import Any

from tandemkv.kernels.dispatch import plain


def in_plain_torch(name: str) -> Any:
    """Return the functions of a module of `tandemkv.kernels`, none of which launches a kernel."""
    module = import_module(f"tandemkv.kernels.{name}")
    functions = {key: plain(x) for key, x in vars(module).items() if isfunction(x)}
    return SimpleNamespace(**functions, __name__=module.__name__)
