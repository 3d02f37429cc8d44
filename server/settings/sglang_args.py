# SPDX-License-Identifier: Apache-2.0
"""Which of SGLang's own arguments may be passed through, and what its environment may be.

SGLang's parser accepts unambiguous abbreviations, so a refused name is also refused when
it is shortened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandemkv.cache_rank.protocol.errors import SettingsError

from .refused_args import (
    ALLOWED,
    ALLOWED_FAMILY,
    FAMILIES,
    NEVER,
    ONLY,
    ONLY_ON_CPU,
    REFUSED,
    VARIABLE_FAMILIES,
    VARIABLES,
)

_OFF = frozenset(("", "0", "false", "no", "n"))
"""Values of a variable with which SGLang does as without it."""


def check_sglang_args(args: Sequence[str], *, device: str) -> None:
    """Refuse arguments that contradict tandemkv.

    Raises `SettingsError`, naming the argument and what to do.
    """
    for position, argument in enumerate(args):
        if not argument.startswith("--"):
            continue
        name, has_value, value = argument.partition("=")
        if not has_value:
            value = args[position + 1] if position + 1 < len(args) else ""
        reason = why_refused(name) or _why_not(name, value, device)
        if reason is not None:
            raise SettingsError(f"SGLang argument {name} cannot be passed: {reason}")


def check_sglang_environment(environ: Mapping[str, str]) -> None:
    """Refuse variables of SGLang that contradict tandemkv.

    Raises `SettingsError`, naming the variable and what to do.
    """
    for name, value in environ.items():
        reason = VARIABLES.get(name)
        for family, why in VARIABLE_FAMILIES.items():
            if name.startswith(family):
                reason = why
        if reason is not None and value.lower() not in _OFF:
            raise SettingsError(f"environment variable {name} is set: {reason}; unset it")


def value_of(args: Sequence[str], full: str) -> str | None:
    """Return the value of the argument `full`, which may be shortened; None if it is not given.

    The last one counts, as in SGLang's parser. The value of a flag that takes none is the empty
    text, or the argument behind it.
    """
    value = None
    for position, argument in enumerate(args):
        name, has_value, text = argument.partition("=")
        if _means(name, full):
            value = text if has_value else "".join(args[position + 1 : position + 2])
    return value


def why_refused(name: str) -> str | None:
    """Return why the argument `name` may not be passed, whatever its value; None if it may."""
    if name in ALLOWED or name.startswith(ALLOWED_FAMILY):
        return None
    for full, why in REFUSED.items():
        if _means(name, full):
            return why
    for family, why in FAMILIES.items():
        if name.startswith(family) or _means(name, family):
            return why
    return None


def _why_not(name: str, value: str, device: str) -> str | None:
    """Return why `name` may not have this value; None if it may."""
    for full, (allowed, why) in {**ONLY, **(ONLY_ON_CPU if device == "cpu" else {})}.items():
        if _means(name, full) and value != allowed:
            return f"{why}; only {allowed} is possible"
    for full, (refused, why) in NEVER.items():
        if _means(name, full) and value == refused:
            return f"{why}; any value but {refused} is possible"
    return None


def _means(name: str, full: str) -> bool:
    """Whether argparse could take `name` for `full`: equal, or a beginning of it."""
    return len(name) > 2 and full.startswith(name)
