# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of kernels: every module ``kernels_*`` here.

A module offers ``rows() -> list[Row]`` and is run by being in this folder.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.server.evaluation.provenance import BenchError

from .report import Failure, Row

PACKAGE = __name__.rpartition(".")[0]


def modules_of(suite: str) -> tuple[str, ...]:
    """Return the names of a suite's benchmarks, without the prefix."""
    names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    prefix = f"{suite}_"
    return tuple(sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix)))


def run_suite(
    suite: str, only: Sequence[str], progress: Callable[[str], None]
) -> tuple[list[Row], list[Failure]]:
    """Run a suite, or `only` some of its benchmarks.

    A benchmark that fails is reported as a failure and does not keep the others from running.

    Raises
    ------
    SettingsError
        If `only` names a benchmark that does not exist, or there is no GPU.
    """
    known = modules_of(suite)
    unknown = sorted(set(only) - set(known))
    if unknown:
        raise SettingsError(
            f"only={','.join(unknown)}: no such benchmark; there are {', '.join(known)}"
        )
    rows: list[Row] = []
    failures: list[Failure] = []
    for name in only or known:
        progress(f"{suite}: {name}")
        module = importlib.import_module(f"{PACKAGE}.{suite}_{name}")
        try:
            rows += module.rows()
        except SettingsError:
            raise
        except (BenchError, RuntimeError, ImportError, ValueError, AssertionError) as error:
            text = " ".join(str(error).split())[:300]
            failures.append(Failure(f"{suite}_{name}", f"{type(error).__name__}: {text}"))
    return rows, failures
