# SPDX-License-Identifier: Apache-2.0
"""What all models of settings are, and what their fields take."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A model that refuses fields which it does not know, and does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def required_type(hint: Any) -> Any:
    """Return a type without its ``| None``."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(item for item in typing.get_args(hint) if item is not type(None))
    return hint
