# SPDX-License-Identifier: Apache-2.0
"""What all models of settings are, and what their fields take."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class FrozenModel(BaseModel):
    """A model that refuses fields which it does not know, and does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_switches(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse yes and no, as YAML reads them, for a number: pydantic takes them for 1 and 0."""
        items = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(item, bool) for item in items):
            types_taken = _leaves(cls.model_fields[str(info.field_name)].annotation)
            if types_taken & {int, float} and bool not in types_taken:
                raise ValueError("a number is required, not true or false (nor yes, no, on or off)")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _read_path(cls, value: Any, info: ValidationInfo) -> Any:
        """Read ``~`` of a path, which a shell leaves in ``--name=~/x``, and a file always has.

        No text is refused: it would be the current directory.
        """
        if not isinstance(value, str | Path):
            return value
        if Path not in _leaves(cls.model_fields[str(info.field_name)].annotation):
            return value
        if not str(value):
            raise ValueError("a path is required; leave the setting out, or write none")
        try:
            return type(value)(Path(value).expanduser())  # JSON takes texts alone
        except RuntimeError as error:
            raise ValueError("there is no such home directory; write the path without ~") from error


def required_type(hint: Any) -> Any:
    """Return a type without its ``| None``."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(item for item in typing.get_args(hint) if item is not type(None))
    return hint


def _leaves(hint: Any) -> set[Any]:
    """Return the types that a type is made of, in unions, tuples and annotations."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        inner = inner[:1]
    elif typing.get_origin(hint) is typing.Literal:
        inner = ()
    return set[Any]().union(*map(_leaves, inner)) if inner else {hint}
