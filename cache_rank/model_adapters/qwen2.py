# SPDX-License-Identifier: Apache-2.0
"""Adapter of Qwen2 and Qwen2.5."""

from __future__ import annotations

from typing import ClassVar

from .base import ModelAdapter


class Qwen2Adapter(ModelAdapter):
    """Plain grouped-query attention with a bias on q_proj."""

    has_bias: ClassVar[bool | None] = True
