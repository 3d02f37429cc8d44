# SPDX-License-Identifier: Apache-2.0
"""Where the cache rank works and how it is reached: decided once, before a process is started.

`tandemkv.server.plan.placement_choice` makes it; both ranks get it with their settings.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.memory.one_device import (
    APART,
    HOST,
    ONE_DEVICE_VARIABLE,
    is_apart_on_one_device,
    is_beside_host_on_one_device,
    is_on_one_device,
)

from .frozen_model import FrozenModel

Link = Literal["shared", "message", "local"]
Device = Literal["cpu", "cuda"]
_Parts = Annotated[int, Field(ge=1, le=64)]

_WHERE = {
    "local": "in SGLang's process, on the same device",
    "shared": "in a process of its own, in memory that both processes map",
    "message": "in a process of its own, met by messages",
    "shared, two GPUs": "in a process of its own, on a GPU of its own, in memory that both map",
    "shared, host": "in a process of its own, on the host's CPU, in host memory that both map",
}
_HOSTS = {"cpu": "processes", "cuda": "GPUs"}


def lies_on_two_gpus(link: str, model_device: str) -> bool:
    """Return `Placement.two_gpus` of a link and the model's device.

    Two processes have a GPU each unless the environment gives them one device (`one_device`).
    """
    if link != "shared":
        return link == "message"
    return is_apart_on_one_device() or (model_device == "cuda" and not is_on_one_device())


def has_host_engine(link: str, model_device: str, *, attends: bool) -> bool:
    """Return `Placement.host_engine` of a link, the model's device and whether the policy attends.

    Raises `SettingsError` if the environment asks for it (`one_device`), and the policy cannot.
    """
    is_played = is_beside_host_on_one_device() and link == "shared"
    if is_played and not attends:
        raise SettingsError(
            f"{ONE_DEVICE_VARIABLE}={HOST} is for policies that attend on the host's CPU; use "
            f"--policy lfps, or {ONE_DEVICE_VARIABLE}={APART}"
        )
    return link == "shared" and attends and (is_played or model_device == "cuda")


class Placement(FrozenModel):
    """One placement of model and cache rank, and why it was chosen."""

    link: Link = "shared"
    """How the inference rank reaches the cache rank."""
    model_device: Device = "cpu"
    """Device of the forward pass; and of the cache rank, but for `host_engine`."""
    tp_size: _Parts = 1
    """GPUs that the model is split over, or processes on a CPU."""
    head_shards: _Parts = 1
    """Cache ranks of each inference rank; each has a part of its KV heads."""
    num_nodes: _Parts = 1
    """Hosts that the model is split over, with as many parts on each."""
    engines_per_rank: _Parts = 1
    """Tensor-parallel ranks that one cache rank serves, with an engine for each."""
    two_gpus: bool = False
    """Whether the processes of link shared have a GPU each, or are laid out so."""
    host_engine: bool = False
    """Whether the cache rank is on the host's CPU beside a model on a GPU, or is laid out so."""
    reason: str = Field(default="it was not decided here", max_length=2048)
    """Why it is so."""

    @property
    def num_cache_ranks(self) -> int:
        """Processes of cache ranks besides SGLang's own."""
        return self.num_engines // self.engines_per_rank

    @property
    def num_engines(self) -> int:
        """Engines of all cache ranks; each has a run directory of its own (`RunDir.of_rank`)."""
        return self.num_shards if self.maps_memory else 0

    @property
    def num_shards(self) -> int:
        """Parts that the model's KV heads are in, over all inference ranks."""
        return self.tp_size * self.head_shards

    @property
    def tp_per_node(self) -> int:
        """Parts of the model on each host."""
        return self.tp_size // self.num_nodes

    def engines_of(self, node: int) -> range:
        """Return the numbers of the engines whose ranks are on `node`."""
        return self._part_of(node, self.num_engines)

    def cache_ranks_of(self, node: int) -> range:
        """Return the numbers of the cache ranks on `node`: each is where its inference rank is."""
        return self._part_of(node, self.num_cache_ranks)

    def node_of(self, tp_rank: int) -> int:
        """Return the node that a tensor-parallel rank is on."""
        return tp_rank * self.num_nodes // self.tp_size

    def _part_of(self, node: int, total: int) -> range:
        return range(total * node // self.num_nodes, total * (node + 1) // self.num_nodes)

    @property
    def has_far_pool(self) -> bool:
        """Whether K/V lie on another GPU than the model, or in host memory beside its GPU.

        What decode attends to is kept beside the model then, apart from the pool. In tests both may
        be one device (`one_device`), and all is done as if they were two.
        """
        return self.maps_memory and (self.two_gpus or self.host_engine)

    @property
    def engine_device(self) -> Device:
        """Device of the cache rank."""
        return "cpu" if self.host_engine else self.model_device

    @property
    def maps_memory(self) -> bool:
        """Whether the cache rank's process maps the memory of the inference rank."""
        return self.link in ("shared", "message")

    @property
    def has_far_host(self) -> bool:
        """Whether the cache rank, and with it all K/V, may be on another host."""
        return self.link == "message"

    @property
    def num_sharing(self) -> int:
        """Cache ranks that map one pool, each for its KV heads."""
        return 1 if self.has_far_host else self.head_shards

    def describe(self) -> str:
        """Return one line that says where what runs, and why."""
        model, ranks = str(self.model_device), "cache rank"
        if self.tp_size > 1:
            model, ranks = f"{self.tp_size} {_HOSTS[self.model_device]}", "cache rank of each"
        if self.num_nodes > 1:
            model += f" on {self.num_nodes} nodes"
        if self.engines_per_rank > 1:
            ranks = f"a cache rank for every {self.engines_per_rank} of them"
        if self.head_shards > 1:
            of_each = " of each" if self.tp_size > 1 else ""
            ranks = f"{self.head_shards} cache ranks{of_each}, each with its part of the KV heads,"
        layout = ", host" if self.host_engine else ", two GPUs" if self.two_gpus else ""
        where = _WHERE[self.link + (layout if self.link == "shared" else "")]
        return f"link {self.link}: model on {model}, {ranks} {where}; {self.reason}"

    def info(self) -> dict[str, str]:
        """Return what a rank's status says of it."""
        return {
            "link": self.link,
            "cache_ranks": str(self.num_cache_ranks),
            "placement": self.describe(),
        }
