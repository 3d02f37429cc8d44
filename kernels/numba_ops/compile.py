# SPDX-License-Identifier: Apache-2.0
"""How kernels are compiled: cached on disk where that is possible, without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import numba
except ImportError as error:
    raise ImportError(
        "the compiled CPU kernels need Numba: `pip install 'tandemkv[lfps]'` "
        "(or `pip install numba`)"
    ) from error

# No "nnan" and "ninf": infinities are values here.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function`, and keep the machine code beside it or in the user's cache folder."""
    try:
        return numba.njit(function, nogil=True, fastmath=_FASTMATH, cache=True)
    except RuntimeError:  # no folder to write to: compiled anew in every process
        return numba.njit(function, nogil=True, fastmath=_FASTMATH)
