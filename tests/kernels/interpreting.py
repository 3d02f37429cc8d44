# SPDX-License-Identifier: Apache-2.0
"""What Triton's interpreter lacks for these kernels, and what it does far too often.

For processes that interpret kernels. Results are those of the interpreter as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def mend_interpreter() -> None:
    """Mend the interpreter of this process."""
    _allow_loaded_bounds()
    _patch_language_once()
    _reduce_at_once()


def _allow_loaded_bounds() -> None:
    """Give the interpreter's tensors ``__index__``: NumPy makes no number of an array [1]."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_index(tensor: object, scope: interpreter._LangPatchScope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index


def _patch_language_once() -> None:
    """Patch Triton's language once, and leave it so: this process only interprets.

    The interpreter looks through all names of the language again for every call of a function
    within a kernel, `tl.sum` and `tl.zeros` among them, which takes far longer than the call.
    """
    patch, patched = interpreter._patch_lang, set[str]()

    def patch_once(function: Callable[..., Any]) -> interpreter._LangPatchScope:
        seen = _modules_seen(function)
        if not seen <= patched:
            patch(function)
            patched.update(seen)
        return interpreter._LangPatchScope()  # empty: a launch undoes what is in it

    interpreter._patch_lang = patch_once


@cache
def _modules_seen(function: Callable[..., Any]) -> frozenset[str]:
    """Return under which of its two modules a function finds the language."""
    found = (x.__name__ for x in function.__globals__.values() if x is tl or x is tl.core)
    return frozenset(found)


def _reduce_at_once() -> None:
    """Let NumPy do the reductions of `tl.sort`, which are done element by element else."""
    reduce_others = interpreter.ReduceOps.apply_impl

    def apply_impl(self: interpreter.ReduceOps, given: tuple[tl.tensor, ...]) -> Any:
        if self.combine_fn != tl.standard._xor_combine:
            return reduce_others(self, given)
        data = given[0].handle.data
        found = np.bitwise_xor.reduce(data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, given[0].dtype)

    interpreter.ReduceOps.apply_impl = apply_impl
