# SPDX-License-Identifier: Apache-2.0
"""Adapter of Llama and of what is built like it (SmolLM2, Mistral without a window)."""

from __future__ import annotations

from .base import ModelAdapter


class LlamaAdapter(ModelAdapter):
    """Plain grouped-query attention; a bias only if the configuration says so."""
