# SPDX-License-Identifier: Apache-2.0
"""Which GPUs the two processes of link ``shared`` use.

Both see the same GPUs in the same order. The inference rank has the first ones, as SGLang counts
them, the engine the next; where tests have one GPU for both (`one_device`), it is the same.
"""

from __future__ import annotations

import torch

from .errors import SettingsError
from .mapped_tensors import Homes
from .one_device import ONE_DEVICE_VARIABLE, is_peer_on_one_device


def inference_homes(device: torch.device, num_before: int = 1) -> Homes:
    """Return where memory lies, as the inference rank on `device` sees it.

    `num_before` is the number of GPUs that inference ranks have.
    """
    if device.type != "cuda":
        return Homes.on_host()
    engine = _engine_of(device, num_before)
    return Homes(inference=device, engine=engine, here=device)


def engine_homes(device: torch.device) -> Homes:
    """Return where memory lies, as the engine of the first inference rank sees it.

    Raises
    ------
    SettingsError
        If it is on a GPU, and there is none for it.
    """
    if device.type != "cuda":
        return Homes.on_host()
    first = torch.device("cuda", 0)
    engine = _engine_of(first, 1)
    if engine.index >= torch.cuda.device_count():
        raise SettingsError(
            f"a cache rank in a process of its own needs a second GPU, {torch.cuda.device_count()} "
            "seen (CUDA_VISIBLE_DEVICES counts); use --cache-ranks 0, or for tests "
            f"{ONE_DEVICE_VARIABLE}=1 under CUDA MPS"
        )
    torch.cuda.set_device(engine)
    return Homes(inference=first, engine=engine, here=engine)


def _engine_of(device: torch.device, num_before: int) -> torch.device:
    if is_peer_on_one_device():
        return device
    return torch.device("cuda", device.index + num_before)
