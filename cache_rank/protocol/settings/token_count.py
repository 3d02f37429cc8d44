# SPDX-License-Identifier: Apache-2.0
"""Numbers of tokens as people write them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_FORM = re.compile(r"([0-9]{1,10})([km]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


def read_token_count(value: Any) -> Any:
    """Return ``64k`` as 65536 and ``1m`` as 1048576; what is no text as it is.

    Raises `ValueError` if a text is no number of tokens.
    """
    if not isinstance(value, str):
        return value
    match = _FORM.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is no number of tokens; write e.g. 65536, 64k or 1m")
    return int(match[1]) * _UNITS[match[2].lower()]


COUNTED = BeforeValidator(read_token_count)
TokenCount = Annotated[int, COUNTED]
"""A setting that is read so, from a flag, the environment or a file."""
