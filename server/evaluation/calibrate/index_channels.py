# SPDX-License-Identifier: Apache-2.0
"""Which channels of keys an index should have: those without which scores change least.

Dropping channels S of a head changes the score of key k under query q by the sum of ``q_c k_c``
over S. Taken as independent, the square of that is on average the sum of ``Q o K`` over S x S: Q
the second moments of queries, K the covariance of keys, for what is the same for all keys of a
text changes no order. Channels are dropped one after another, each time the one that adds least.

Double Sparsity (Yang et al., arXiv:2408.07092, section 3.1) takes the channels with the largest
``|q_c k_c|``; here what channels have in common counts as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tandemkv.cache_rank.protocol.models.index_channels import indexed_layers
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec

from .attention import load_network

SKIPPED_TOKENS = 4
"""First tokens of a text, whose keys are like no others: they are always attended to."""


class Kept(NamedTuple):
    """Channels ``[H, R]`` of a layer, and what share of the variance of scores they make."""

    channels: torch.Tensor
    share: float


class ChannelMeasurement:
    """Runs a model with transformers, and adds up moments of its queries and keys.

    They are taken behind rotation and norms, as SGLang keeps keys. By layer, ``[H, D, D]`` float64:
    `queries` are second moments, `keys` covariances.
    """

    def __init__(self, model_dir: Path, model: ModelSpec, *, dtype: str) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

        name = f"tandemkv-moments-{id(self)}"  # known to the whole process
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, sdpa_mask)
        self._network = load_network(model_dir, dtype, attn_implementation=name)
        shape = (model.num_kv_heads, model.head_dim, model.head_dim)
        layers = indexed_layers(model)
        self.queries = {x: torch.zeros(shape, dtype=torch.float64) for x in layers}
        self.keys = {x: torch.zeros(shape, dtype=torch.float64) for x in layers}

    @torch.inference_mode()
    def add(self, tokens: Sequence[int]) -> None:
        """Read a text."""
        self._network.model(torch.tensor([list(tokens)]), use_cache=False)

    def result(self, num_channels: int) -> dict[int, Kept]:
        """Return the channels of each layer that attends to the whole context."""
        return {layer: keep(self.products(layer), num_channels) for layer in self.queries}

    def products(self, layer: int) -> torch.Tensor:
        """Return what each pair of channels adds to the variance of scores, ``[H, D, D]``."""
        return self.queries[layer] * self.keys[layer]

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Look at a layer's queries ``[1, Hq, T, D]`` and keys ``[1, H, T, D]``; attend."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if module.layer_idx in self.queries:
            self.take_in(module.layer_idx, query[0], key[0])
        return sdpa_attention_forward(module, query, key, *args, **kwargs)

    def take_in(self, layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        """Add up a layer's queries ``[Hq, T, D]`` and keys ``[H, T, D]`` of a text."""
        own, keys = (x[:, SKIPPED_TOKENS:].double() for x in (query, key))
        own = own.unflatten(0, (len(keys), -1)).flatten(1, 2)
        keys = keys - keys.mean(1, keepdim=True)
        self.queries[layer] += own.mT @ own
        self.keys[layer] += keys.mT @ keys


def keep(products: torch.Tensor, num_channels: int) -> Kept:
    """Keep channels, given ``[H, D, D]``: what each pair of channels adds to the change of scores.

    In rising order.
    """
    heads, size, _ = products.shape
    is_kept = torch.ones(heads, size, dtype=torch.bool)
    with_dropped = torch.zeros_like(products[:, 0])
    own, every = products.diagonal(dim1=1, dim2=2), torch.arange(heads)
    lost = torch.zeros(heads, dtype=products.dtype)
    for _ in range(size - num_channels):
        added = (own + 2 * with_dropped).masked_fill(~is_kept, float("inf"))
        least = added.argmin(1)
        lost += added[every, least]
        is_kept[every, least] = False
        with_dropped += products[every, least]
    channels = is_kept.nonzero()[:, 1].view(heads, num_channels)
    total = products.sum((1, 2)).clamp_min(torch.finfo(products.dtype).tiny)
    return Kept(channels, float((1 - lost / total).mean()))
