# SPDX-License-Identifier: Apache-2.0
"""Settings of the launcher: what both ranks agree on, and how to start them.

The groups ``selection``, ``exchange`` and ``cache`` are those of `RankSettings`; the rest
concerns one machine's launch and is not part of the handshake.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.settings.exchange_settings import CacheSettings, ExchangeSettings
from tandemkv.cache_rank.protocol.settings.frozen_model import FrozenModel
from tandemkv.cache_rank.protocol.settings.placement import (
    Link,
    Placement,
    has_host_engine,
    lies_on_two_gpus,
)
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings, SelectionSettings
from tandemkv.cache_rank.protocol.settings.token_count import TokenCount
from tandemkv.inference_rank.edge.settings import EdgeSettings

EMBEDDED_MODEL = "smollm2"
_MOST_CACHE_RANKS = 64


class ServeSettings(FrozenModel):
    """Everything that ``tandemkv serve`` can be told."""

    model: str = Field(
        min_length=1, description="Model directory in Hugging Face layout, or smollm2 (embedded)."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Device of the model and of all K/V; with lfps K/V are in host memory. "
        "auto: GPUs if there are any. Fewer GPUs than asked for are refused.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights and K/V. auto: float32 on a CPU, the model's own on a GPU."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    allow_remote: bool = Field(False, description="Allow a --host that other machines can reach.")
    port: int = Field(30000, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    cache_ranks: int | None = Field(
        None,
        ge=0,
        le=_MOST_CACHE_RANKS,
        description="0: inside SGLang's process; n: n processes, each with a part of the KV heads "
        "and on GPUs a GPU of its own. n is a multiple of --tp, or on a CPU a divisor of it. lfps "
        "beside a GPU has one, on the host's CPU. Default: on a CPU as many as --tp; on GPUs 0 or, "
        "with one GPU for the model, 1, whichever `tandemkv plan` predicts to be faster.",
    )
    transport: Link | None = Field(
        None,
        description="How the ranks meet. shared: the cache rank is a process of its own, and both "
        "map the same memory; message: it may be on another host; "
        "local: on the model's own device. Default: what fits.",
    )
    cache_rank_address: str | None = Field(
        None,
        description="tcp://HOST:PORT of a cache rank that `tandemkv cache-rank --address` serves, "
        "on another host or here (transport message). HOST may be a name. Several, with commas, "
        "have a part of the KV heads each.",
    )
    link_keys: Path | None = Field(
        None,
        description="Folder of CURVE keys that `tandemkv link-keys` makes, for cache "
        "ranks that are met at an address.",
    )
    calibrated: bool = Field(
        True,
        description="Take up what `tandemkv calibrate MODEL` has left on this machine for this "
        "model, where no other files are named (look_ahead).",
    )
    placement: Placement | None = Field(
        None, description="Where the cache rank works; entered by `serve`, which decides it."
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="GPUs that the model is split over (tensor parallel), or processes on a CPU. "
        "Default: 1 on a CPU; on GPUs chosen with the placement.",
    )
    nnodes: int = Field(
        1,
        ge=1,
        le=64,
        description="Hosts that the model is split over, with as many processes of --tp on each; "
        "on GPUs without cache ranks unless they are asked for. Every one is started with the same "
        "settings, but for --node-rank.",
    )
    node_rank: int = Field(
        0, ge=0, le=63, description="Number of this host, of --nnodes; 0 is the one with HTTP."
    )
    dist_init_addr: str | None = Field(
        None,
        description="HOST:PORT at which SGLang's processes of all --nnodes meet: a free port of "
        "host 0, on an address that the others reach.",
    )
    max_running_requests: int = Field(
        8, ge=1, le=4096, description="Requests that decode at the same time."
    )
    max_context: TokenCount | None = Field(
        None,
        ge=128,
        le=1 << 24,
        description="Longest request. Default: the model's "
        "limit; --cache-tokens must hold the request too.",
    )
    chunked_prefill_size: int | None = Field(
        None,
        ge=16,
        le=1 << 20,
        description="Prompt tokens per forward pass. Default: "
        "2048 on a CPU, SGLang's own on a GPU.",
    )
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        le=86400,
        description="Longest wait until both ranks are ready and SGLang is warm; a first start "
        "on a GPU compiles kernels for minutes.",
    )
    drain_timeout_s: float = Field(
        30.0,
        ge=0,
        le=86400,
        description="Time for requests under way at SIGTERM or Ctrl-C; new ones get 503 "
        "meanwhile. A second signal ends at once.",
    )
    hang_timeout_s: float | None = Field(
        None,
        ge=1,
        le=86400,
        description="A rank that has work and makes no progress for so long is ended and started "
        "again; default 15, on cuda 60, where a pass is one piece.",
    )
    max_restarts: int = Field(
        10,
        ge=0,
        le=1000,
        description="Restarts of one rank within 10 minutes, after which the launch ends with 1; "
        "0: none.",
    )
    standby: bool = Field(
        False,
        description="Keep a second cache rank loaded, which takes the place of one that is lost "
        "at once. It is on the cache rank's host, and an option of `tandemkv cache-rank` there.",
    )
    run_dir: Path | None = Field(
        None, description="Directory of sockets, token and logs; default a fresh private one."
    )
    sglang_args: tuple[str, ...] = Field(
        (), description="Arguments passed on to SGLang, what follows -- on the command line."
    )
    selection: SelectionSettings = Field(default_factory=SelectionSettings)
    exchange: ExchangeSettings = Field(default_factory=ExchangeSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    edge: EdgeSettings = Field(default_factory=EdgeSettings)
    evaluation: bool = Field(
        False, description="Allow forced tokens and attention probes; off when serving."
    )
    stress_selection: bool = Field(
        False, description="Benchmarks only: queries jump, so that every step moves all it may."
    )

    @property
    def rank_settings(self) -> RankSettings:
        """The part that both ranks share."""
        return RankSettings(
            selection=self.selection,
            placement=self.placement or self.placement_on(self.device_or("cpu")),
            exchange=self.exchange,
            cache=self.cache,
            evaluation=self.evaluation,
            stress_selection=self.stress_selection,
        )

    def device_or(self, other: str) -> str:
        """Return the inference rank's device, or `other` if it is left open."""
        return other if self.device == "auto" else self.device

    @property
    def wished_link(self) -> Link | None:
        """The link that was asked for, if any; `cache_ranks` alone decides whether it is local."""
        if self.cache_ranks == 0:
            return "local"
        return "message" if self.cache_rank_address is not None else self.transport

    @property
    def cache_rank_addresses(self) -> tuple[str, ...]:
        """Addresses of cache ranks on other hosts, by their number; none for one host."""
        if self.cache_rank_address is None:
            return ()
        return tuple(x.strip() for x in self.cache_rank_address.split(","))

    @property
    def nodes_address(self) -> str | None:
        """HOST:PORT where SGLang's processes of several hosts meet; None if all are on this one."""
        return self.dist_init_addr if self.nnodes > 1 else None

    @property
    def head_shards(self) -> int:
        """Cache ranks of each inference rank."""
        if self.wished_link == "local":
            return 1
        return self._num_cache_ranks // self.tensor_parallel or 1

    @property
    def engines_per_rank(self) -> int:
        """Inference ranks that each cache rank serves."""
        if self.wished_link in ("local", "message"):
            return 1
        return self.tensor_parallel // self._num_cache_ranks or 1

    @property
    def _num_cache_ranks(self) -> int:
        """Cache ranks that were asked for; left open, one for each inference rank."""
        return len(self.cache_rank_addresses) or self.cache_ranks or self.tensor_parallel

    def placement_on(self, device: str, reason: str = "it was not decided here") -> Placement:
        """Return the placement that these settings lead to, with the model on `device`."""
        link, attends = self.wished_link or "shared", self.selection.declared.attends
        host_engine = has_host_engine(link, device, attends=attends)
        return Placement.model_validate(
            {
                "link": link,
                "model_device": device,
                "two_gpus": not host_engine and lies_on_two_gpus(link, device),
                "host_engine": host_engine,
                "tp_size": self.tensor_parallel,
                "num_nodes": self.nnodes,
                "head_shards": self.head_shards,
                "engines_per_rank": self.engines_per_rank,
                "reason": reason,
            }
        )

    @field_validator("selection", mode="before")
    @classmethod
    def _ask_policy(cls, value: Any) -> Any:
        """Enter what the policy's class declares: defaults of other settings depend on it."""
        if not isinstance(value, SelectionSettings | dict):
            return value  # refused by its type
        from tandemkv.cache_rank.policies.base import PolicyError
        from tandemkv.cache_rank.policies.registry import selection_values

        try:
            return selection_values(value)
        except PolicyError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.allow_remote and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host} can be reached from other machines; use 127.0.0.1, or add "
                "--allow-remote if that is what you want, and --api-key-file so that requests need "
                "a key"
            )
        if self.cache_ranks and self.transport == "local":
            raise ValueError(
                f"transport=local and cache_ranks={self.cache_ranks} contradict each other; use "
                "--cache-ranks 0"
            )
        if self.cache_ranks == 0 and self.transport in ("shared", "message"):
            raise ValueError(
                f"transport={self.transport} and cache_ranks=0 contradict each other: 0 is none in "
                "a process of its own; leave --transport out, or use --cache-ranks 1"
            )
        self._check_cache_ranks()
        self._check_message()
        self._check_nodes()
        if self.cache.stored_dtype and self.selection.declared.attends:
            raise ValueError(
                f"policy={self.selection.policy} attends to K and V itself, in the model's dtype, "
                f"and kv_dtype={self.cache.kv_dtype}; use --kv-cache-dtype auto, or another policy"
            )
        if self.standby and self.wished_link == "local":
            raise ValueError(
                f"standby needs transport=shared, and transport={self.wished_link}; leave "
                "--standby out, or use --transport shared"
            )
        return self

    def _check_message(self) -> None:
        """Refuse what link message has not, or lacks."""
        if self.cache_rank_address is not None:
            for address in self.cache_rank_addresses:
                LinkAddress.parse_peer(address)
            count = len(self.cache_rank_addresses)
            if self.cache_ranks not in (None, count) or self.transport not in (None, "message"):
                raise ValueError(
                    f"cache_rank_address names {count} cache ranks, met by messages; leave "
                    "--cache-ranks and --transport out"
                )
            if count > _MOST_CACHE_RANKS or count > len(set(self.cache_rank_addresses)):
                raise ValueError(
                    f"cache_rank_address={self.cache_rank_address} must name each cache rank "
                    f"once, and {_MOST_CACHE_RANKS} at most"
                )
            if self.link_keys is None:
                raise ValueError(
                    "cache_rank_address needs keys of both ends; add --link-keys with the folder "
                    "that `tandemkv link-keys` made"
                )
        if self.wished_link == "message" and self.evaluation:
            raise ValueError(
                "transport=message is not available with evaluation in this version; use "
                "--transport shared, whose books are at hand"
            )

    def _check_nodes(self) -> None:
        """Refuse hosts that do not have as many ranks each."""
        nodes = self.nnodes
        if nodes == 1:  # what is left over then, a launch refuses: torchrun adds their number
            return
        if self.node_rank >= nodes:
            raise ValueError(
                f"node_rank={self.node_rank}: of nnodes={nodes} the last is {nodes - 1}"
            )
        if self.dist_init_addr is None:
            raise ValueError(
                f"nnodes={nodes}: the hosts have to know where to meet; add --dist-init-addr "
                "HOST:PORT, with an address of host 0 and a free port there"
            )
        LinkAddress.parse_node(self.dist_init_addr)
        if self.wished_link == "message":
            raise ValueError(
                f"nnodes={nodes} with link message is not available: each host has cache ranks for "
                "its own processes, or none; leave --transport and --cache-rank-address out"
            )
        if self.tensor_parallel % nodes:
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} must be a multiple of nnodes={nodes}, as "
                f"each host has as many processes; use --tp {nodes}, or --cache-rank-address for "
                "cache ranks alone on other hosts"
            )
        if self._num_cache_ranks % nodes:
            raise ValueError(
                f"cache_ranks={self.cache_ranks} must be a multiple of nnodes={nodes}, as each "
                f"host has as many; use --cache-ranks {self.tensor_parallel}"
            )

    def _check_cache_ranks(self) -> None:
        """Refuse a number of cache ranks that the link has no use for."""
        tp_size = self.tensor_parallel
        given = len(self.cache_rank_addresses) or self.cache_ranks
        if not given:
            return
        is_far = self.wished_link == "message"
        if given % tp_size and (is_far or tp_size % given):
            reason, other = "one has to divide the other", "a multiple or a divisor of it"
            if is_far:
                reason = "by messages each tensor-parallel rank has cache ranks of its own, as many"
                reason, other = f"{reason} as the others", "a multiple of it (or as many addresses)"
            raise ValueError(
                f"cache_ranks={given} and tensor_parallel={tp_size}: {reason}; use --cache-ranks "
                f"{tp_size}, or {other}, or 0 for none in a process of its own, or --tp {given}"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Names other than localhost count as remote."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
