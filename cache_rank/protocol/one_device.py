# SPDX-License-Identifier: Apache-2.0
"""For tests: transport ``shared`` on a machine that has no second GPU.

With ``TANDEMKV_ONE_DEVICE=1`` the cache rank's process works on the device of the forward pass, a
GPU (under CUDA MPS) or the CPU, with the resident sets in the pool. With
``TANDEMKV_ONE_DEVICE=apart`` memory is laid out as for two GPUs, and passes of SGLang overlap as
there. So either can be tested anywhere. Its times say nothing of two GPUs.
"""

import os

ONE_DEVICE_VARIABLE = "TANDEMKV_ONE_DEVICE"
APART = "apart"


def is_on_one_device() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get(ONE_DEVICE_VARIABLE) in ("1", APART)


def is_apart_on_one_device() -> bool:
    """Whether link ``shared`` is to be laid out as for two GPUs on one device."""
    return os.environ.get(ONE_DEVICE_VARIABLE) == APART
