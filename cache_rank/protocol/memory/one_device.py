# SPDX-License-Identifier: Apache-2.0
"""For tests: transport ``shared`` on a machine that has no second GPU.

With ``TANDEMKV_ONE_DEVICE=1`` the cache rank's process works on the device of the forward pass, a
GPU (under CUDA MPS) or the CPU, with the resident sets in the pool. With
``TANDEMKV_ONE_DEVICE=apart`` memory is laid out as for two GPUs, and passes of SGLang overlap as
there. With ``TANDEMKV_ONE_DEVICE=host`` a CPU stands for the GPU of a model whose engine is on the
host's CPU: memory and flags are those of that placement. So each can be tested anywhere. Its times
say nothing of GPUs.
"""

import os

ONE_DEVICE_VARIABLE = "TANDEMKV_ONE_DEVICE"
APART, HOST = "apart", "host"


def is_on_one_device() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get(ONE_DEVICE_VARIABLE) in ("1", APART, HOST)


def is_apart_on_one_device() -> bool:
    """Whether link ``shared`` is to be laid out as for two GPUs on one device."""
    return os.environ.get(ONE_DEVICE_VARIABLE) == APART


def is_beside_host_on_one_device() -> bool:
    """Whether the model's device is to be taken for a GPU beside an engine on the host's CPU."""
    return os.environ.get(ONE_DEVICE_VARIABLE) == HOST
