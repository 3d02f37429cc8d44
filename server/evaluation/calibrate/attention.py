# SPDX-License-Identifier: Apache-2.0
"""Runs a model with transformers and hands out each layer's attention, pooled by KV head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec

Pool = Callable[[torch.Tensor], torch.Tensor]
"""``[H, G, T, T]`` post-softmax weights to ``[H, T, T]``."""


def load_network(model_dir: Path, dtype: str, **options: Any) -> Any:
    """Return a model on torch's default device, to compute in its `dtype` of that name."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    network = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), **options
    )
    return network.eval()


def stream_before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the residual stream that a layer was called with, ``[1, T, hidden_size]``."""
    found: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def mean_of_group(weights: torch.Tensor) -> torch.Tensor:
    """Post-softmax pooling over the query heads of a group (Kascade, section 3.4)."""
    return weights.mean(dim=1)


def max_of_group(weights: torch.Tensor) -> torch.Tensor:
    """Max-pooling over the query heads of a group (SyncKV, appendix B.1)."""
    return weights.amax(dim=1)


@dataclass(slots=True)
class TextAttention:
    """Attention of one text of T tokens."""

    weights: list[torch.Tensor] = field(default_factory=list)
    """Per layer ``[H, T, T]`` float32, query by key."""
    importance: list[float] = field(default_factory=list)
    """Per layer ``1 - cos(x, y)``, mean over tokens: x the residual stream before attention, y
    after attention is added to it."""


class AttentionRecorder:
    """A model with eager attention, whose layers are read by hooks, one at a time."""

    def __init__(self, model_dir: Path, model: ModelSpec, *, dtype: str, pool: Pool) -> None:
        self._network = load_network(model_dir, dtype, attn_implementation="eager")
        self._model, self._pool = model, pool
        self._stream = torch.empty(0)
        self._attended: torch.Tensor | None = None
        self._found = TextAttention()
        for layer in self._network.model.layers:
            layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)
            layer.self_attn.register_forward_hook(self._after_attention)
            for name, part in layer.named_children():
                if name != "self_attn":
                    part.register_forward_pre_hook(self._before_part)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> TextAttention:
        """Return the attention of one text."""
        self._found = TextAttention()
        self._network.model(torch.tensor([list(tokens)]), use_cache=False)
        return self._found

    def _before_layer(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stream = stream_before(args, kwargs)

    def _after_attention(self, _: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._attended, weights = output[:2]
        grouped = weights[0].float().unflatten(0, (self._model.num_kv_heads, -1))
        self._found.weights.append(self._pool(grouped))

    def _before_part(self, _: Any, args: tuple[torch.Tensor, ...]) -> None:
        """Take the stream behind attention from the first part of the layer that is given it.

        What attention returned may have a norm or a factor of its own before it is added.
        """
        if self._attended is None or args[0] is self._attended:
            return
        self._attended = None
        before, after = self._stream.float(), args[0].float()
        cosine = torch.cosine_similarity(before, after, dim=-1).mean()
        self._found.importance.append(1.0 - float(cosine))
