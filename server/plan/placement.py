# SPDX-License-Identifier: Apache-2.0
"""Where the parts can run on a number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tandemkv.cache_rank.protocol.errors import SettingsError

from .shape import ModelShape

RAN_ON_GPUS = frozenset(
    {"in-process-tp1", "in-process-tp2", "in-process-tp4", "1+1", "1+3", "tp2+2"}
)
"""Names of the placements that reports of docs/benchmarks have figures of; those of 2 + 2 are of an
earlier version."""


class PlacementKind(StrEnum):
    """How inference and cache share the GPUs."""

    DENSE = "dense"
    """Stock SGLang, for comparison."""
    IN_PROCESS = "in_process"
    """Each GPU keeps and searches the KV of its own heads."""
    SEPARATE = "separate"
    """Some GPUs run the model, others keep the KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`tp_size` GPUs run the model; `num_cache_gpus` more, a multiple of it, keep the K/V.

    `by_messages`: they are met by messages; the model's GPUs hold all K/V as well then.
    """

    kind: PlacementKind
    tp_size: int
    num_cache_gpus: int = 0
    by_messages: bool = False

    @property
    def num_gpus(self) -> int:
        """All GPUs of the placement."""
        return self.tp_size + self.num_cache_gpus

    @property
    def name(self) -> str:
        """Short name, e.g. ``dense-tp2``, ``in-process-tp2``, ``1+1``."""
        if self.kind is not PlacementKind.SEPARATE:
            return f"{self.kind.replace('_', '-')}-tp{self.tp_size}"
        inference = f"tp{self.tp_size}" if self.tp_size > 1 else "1"
        return f"{inference}+{self.num_cache_gpus}"

    @property
    def is_chosen(self) -> bool:
        """Whether `serve` takes it unasked, where it is predicted to be fastest."""
        if self.by_messages:
            return False
        return self.kind is PlacementKind.IN_PROCESS or self.name == "1+1"

    @property
    def has_run(self) -> bool:
        """Whether it ever ran on GPUs; stock SGLang did."""
        return self.by_messages or self.kind is PlacementKind.DENSE or self.name in RAN_ON_GPUS

    @property
    def flags(self) -> tuple[str, ...]:
        """What `tandemkv serve` is told to take this placement; stock SGLang has none."""
        if self.kind is PlacementKind.DENSE:
            return ()
        tensor_parallel = ("--tp", str(self.tp_size)) if self.tp_size > 1 else ()
        return ("--cache-ranks", str(self.num_cache_gpus), *tensor_parallel)

    @property
    def title(self) -> str:
        """What a person reads."""
        tensor_parallel = f"TP{self.tp_size}" if self.tp_size > 1 else "1 GPU"
        if self.kind is PlacementKind.DENSE:
            return f"stock SGLang, dense, {tensor_parallel}"
        if self.kind is PlacementKind.IN_PROCESS:
            return f"cache rank in process, {tensor_parallel}"
        plural = "s" if self.num_cache_gpus > 1 else ""
        link = ", by messages" if self.by_messages else ""
        return f"{self.tp_size} inference + {self.num_cache_gpus} cache GPU{plural}{link}"


def possible_placements(
    shape: ModelShape,
    num_gpus: int,
    tp_size: int | None = None,
    num_cache_gpus: int | None = None,
    *,
    by_messages: bool = False,
) -> tuple[Placement, ...]:
    """Return the placements that this version serves on `num_gpus`.

    The first is always stock SGLang. It and the cache rank in process use as many GPUs as the
    model's heads divide into; of those with cache GPUs there are one pair, as many pairs as there
    are, and one GPU for the model with all others as cache GPUs, if there are KV heads for them;
    none if some layers do not attend to the whole context. With `tp_size` the model is on so many
    GPUs in each, and of pairs there are as many. With `num_cache_gpus` there is that placement
    alone, whether it is served or not, and stock SGLang on no more GPUs; `by_messages` says how
    these are met. Raises `SettingsError` if there is no GPU.
    """
    if num_gpus < 1:
        raise SettingsError(f"gpus={num_gpus}: at least one GPU is needed")
    if num_cache_gpus is not None:
        kind = PlacementKind.SEPARATE if num_cache_gpus else PlacementKind.IN_PROCESS
        own = Placement(
            kind=kind,
            tp_size=tp_size or 1,
            num_cache_gpus=num_cache_gpus,
            by_messages=by_messages and num_cache_gpus > 0,
        )
        stock = _largest_tp(shape, own.num_gpus)
        return Placement(kind=PlacementKind.DENSE, tp_size=stock), own
    whole = tp_size or _largest_tp(shape, num_gpus)
    found = [
        Placement(kind=PlacementKind.DENSE, tp_size=whole),
        Placement(kind=PlacementKind.IN_PROCESS, tp_size=whole),
    ]
    if shape.other_layers:  # which attend where the model is
        return tuple(found)
    if num_gpus >= 2:
        found += [
            Placement(kind=PlacementKind.SEPARATE, tp_size=size, num_cache_gpus=size)
            for size in sorted({1, tp_size or 1, _largest_tp(shape, num_gpus // 2)})
            if 2 * size <= num_gpus
        ]
    if 2 < num_gpus <= shape.num_kv_heads + 1:
        found.append(Placement(kind=PlacementKind.SEPARATE, tp_size=1, num_cache_gpus=num_gpus - 1))
    return tuple(item for item in found if tp_size in (None, item.tp_size))


def _largest_tp(shape: ModelShape, num_gpus: int) -> int:
    """Return the largest number of shards, `num_gpus` at most, that every head count allows."""
    return next(
        size
        for size in range(num_gpus, 0, -1)
        if shape.num_kv_heads % size == 0 and shape.num_qo_heads % size == 0
    )
