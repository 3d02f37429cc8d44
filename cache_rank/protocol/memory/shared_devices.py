# SPDX-License-Identifier: Apache-2.0
"""Which GPUs the processes of links ``shared`` and ``message`` use.

By link ``shared`` all of one host see the same GPUs in the same order. Inference ranks have the
first ones, as SGLang counts them, engines the next, in the order of their inference ranks; several
of one have as many each. Each of several hosts counts its own. Where tests have one GPU for all
(`one_device`), it is the same. The handshake compares them by UUID, for an index means nothing to
another process. By link ``message`` a rank and its pump have one GPU, and all of the memory that
they map is that GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tandemkv.cache_rank.protocol.errors import SettingsError

from .mapped_tensors import Homes
from .one_device import ONE_DEVICE_VARIABLE, is_on_one_device

_ROLES = ("the model's", "the cache rank's", *["one of the cache ranks'"] * 64)


def one_gpu_homes(device: torch.device) -> Homes:
    """Return where memory lies if all of it is that of `device`; a GPU is made the current one."""
    if device.type != "cuda":
        return Homes.on_host()
    torch.cuda.set_device(device)
    return Homes(inference=device, engine=device, here=device)


def far_gpu(device: str, rank: int) -> torch.device:
    """Return the device of cache rank `rank` behind link ``message``: GPUs that are seen, in turn.

    Raises `SettingsError` if it is to be a GPU, and none is seen.
    """
    if device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.device_count():
        raise SettingsError(
            "device=cuda: torch sees no CUDA device (CUDA_VISIBLE_DEVICES counts); use --device "
            "cpu for both ranks"
        )
    return torch.device("cuda", rank % torch.cuda.device_count())


def same_gpu(theirs: Sequence[str], ours: Sequence[str]) -> str | None:
    """Return why the GPUs of two hosts cannot exchange messages; None: they can."""
    if len(theirs) != len(ours):
        return differing_gpu(theirs, ours)
    shared = set(theirs) & set(ours)
    if not shared:
        return None
    return (
        f"both ranks are on GPU {shared.pop()[:64]}, and NCCL connects two; name another one in "
        "CUDA_VISIBLE_DEVICES of the cache rank"
    )


def inference_homes(device: torch.device, num_before: int = 1, num_engines: int = 1) -> Homes:
    """Return where memory lies, as the inference rank on `device` sees it.

    `num_before` is the number of GPUs that inference ranks have here, `num_engines` that of cache
    ranks of each. Of several the first one's is `Homes.engine`. Raises `SettingsError` if there is
    no GPU for one of them.
    """
    if device.type != "cuda":
        return Homes.on_host()
    engines = _engines_of(device, num_before, num_engines)
    pools = engines if num_engines > 1 else ()
    return Homes(inference=device, engine=engines[0], here=device, pools=pools)


def engine_homes(
    device: torch.device, rank: int = 0, num_before: int = 1, num_engines: int = 1
) -> Homes:
    """Return where memory lies, as the engine of cache rank `rank` sees it, as this host counts.

    The other arguments are those of `inference_homes`. Raises `SettingsError` if it is on a GPU,
    and there is none for it.
    """
    if device.type != "cuda":
        return Homes.on_host()
    inference = torch.device("cuda", rank // num_engines)
    homes = inference_homes(inference, num_before, num_engines).with_engine(rank % num_engines)
    torch.cuda.set_device(homes.engine)
    return replace(homes, here=homes.engine)


def gpu_uuids(homes: Homes) -> tuple[str, ...]:
    """Return the UUIDs of the model's GPU, of the engine's, and of those with a part of the pool.

    None where all is on a host, or the engine is.
    """
    if homes.host_engine or not homes.are_on_gpu:
        return ()
    gpus = (homes.inference, homes.engine, *homes.pools)
    return tuple(str(torch.cuda.get_device_properties(gpu).uuid) for gpu in gpus)


def differing_gpu(theirs: Sequence[str], ours: Sequence[str]) -> str | None:
    """Return why the GPUs of the inference rank are not those of the cache rank; None: they are."""
    if bool(theirs) != bool(ours):
        where = {True: "GPUs", False: "the host's CPU"}
        return (
            f"the inference rank is on {where[bool(theirs)]}, the cache rank on "
            f"{where[bool(ours)]}; give both ranks the same --device"
        )
    if len(theirs) != len(ours):
        return (
            f"the inference rank counts {len(theirs)} GPUs, and the cache rank {len(ours)}; give "
            "all ranks the same --cache-ranks"
        )
    for role, their, our in zip(_ROLES, theirs, ours, strict=False):
        if their != our:
            return (
                f"{role} GPU is {their[:64]} as the inference rank counts, and {our} as the cache "
                "rank does; let both see the same GPUs in the same order (CUDA_VISIBLE_DEVICES)"
            )
    return None


def _engines_of(
    device: torch.device, num_before: int, num_engines: int
) -> tuple[torch.device, ...]:
    if is_on_one_device():
        return (device,) * num_engines
    first = num_before + device.index * num_engines
    if first + num_engines > torch.cuda.device_count():
        wanted = "a second GPU" if num_engines == 1 else f"a GPU each, cuda:{first} and the next"
        raise SettingsError(
            f"a cache rank in a process of its own needs {wanted}, {torch.cuda.device_count()} "
            "seen (CUDA_VISIBLE_DEVICES counts); use --cache-ranks 0, or for tests "
            f"{ONE_DEVICE_VARIABLE}=1 under CUDA MPS"
        )
    return tuple(torch.device("cuda", first + number) for number in range(num_engines))
