# SPDX-License-Identifier: Apache-2.0
"""What opening an epoch moves to another host, and how long that may take.

A limit for round trips alone would fit no model: weights of the prediction go over the network in
each epoch, and the cache rank's host makes all memory for K/V in its first one.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tandemkv.cache_rank.protocol.memory.descriptor_messages import TensorSpec
from tandemkv.cache_rank.protocol.models.model_spec import ModelSpec
from tandemkv.cache_rank.protocol.models.predictor_weights import PREDICTOR_PREFIX, most_bytes
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings

_SENT_PER_S, _MADE_PER_S = 50e6, 1e9
"""Bytes, at the least rates: half of a network of 1 Gbit/s, and half of one core filling pages."""


def opening_s(specs: Iterable[TensorSpec], most_sent: int = 0) -> float:
    """Return the seconds that the cache rank's host may take to have the memory of `specs`.

    Weights of the prediction are sent to it, and all else is made there. `most_sent` are bytes that
    may be sent besides. This comes on top of a limit for round trips.
    """
    sent, made = most_sent, 0
    for spec in specs:
        if spec.name.startswith(PREDICTOR_PREFIX):
            sent += spec.nbytes
        else:
            made += spec.nbytes
    return sent / _SENT_PER_S + made / _MADE_PER_S


def most_told(model: ModelSpec, settings: RankSettings) -> int:
    """Return the most bytes for the prediction of queries: the weights of all heads come.

    `model` has those of this cache rank, and others may have a KV head more.
    """
    count = settings.placement.head_shards
    most = model.gqa_group_size * (model.num_kv_heads * count + count - 1)
    whole = msgspec.structs.replace(model, num_qo_heads=most)
    return most_bytes(whole, settings.cache.capacity_tokens)
