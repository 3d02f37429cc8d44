# SPDX-License-Identifier: Apache-2.0
"""What all models of settings are."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A model that refuses fields which it does not know, and does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
