# SPDX-License-Identifier: Apache-2.0
"""What a check of ``tandemkv doctor`` has found."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One line: `advice` says what to do unless the level is ok."""

    name: str
    level: Literal["ok", "warn", "fail"]
    text: str
    advice: str = ""
