# SPDX-License-Identifier: Apache-2.0
"""JSON of reports: short enough to be read, and with a line for each row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def compact_json(whole: Mapping[str, Any]) -> str:
    """Return JSON with a line for each key, and for each member of lists and mappings below it.

    A report has at most about 200 lines so, and a difference of two shows the rows that changed.
    """
    lines = []
    for key, value in whole.items():
        if isinstance(value, list) and value:
            inner = ",\n".join(f"  {_json(item)}" for item in value)
            lines.append(f" {_json(key)}: [\n{inner}\n ]")
        elif isinstance(value, Mapping) and value:
            inner = ",\n".join(f"  {_json(k)}: {_json(item)}" for k, item in value.items())
            lines.append(f" {_json(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {_json(key)}: {_json(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
