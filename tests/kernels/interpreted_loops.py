# SPDX-License-Identifier: Apache-2.0
"""Lets Triton's interpreter loop to a bound that a kernel has loaded."""

from triton.runtime import interpreter


def allow_loaded_bounds() -> None:
    """Give the interpreter's tensors ``__index__``: NumPy makes no number of an array [1]."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_index(tensor: object, scope: interpreter._LangPatchScope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index
