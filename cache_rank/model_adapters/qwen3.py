# SPDX-License-Identifier: Apache-2.0
"""Adapter of Qwen3."""

from __future__ import annotations

from typing import ClassVar

from .base import ModelAdapter


class Qwen3Adapter(ModelAdapter):
    """Grouped-query attention with a norm per query head before RoPE."""

    has_query_norm: ClassVar[bool] = True
