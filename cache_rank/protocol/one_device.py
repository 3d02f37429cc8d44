# SPDX-License-Identifier: Apache-2.0
"""For tests: transports ``peer`` and ``shared`` on a machine that has no second GPU.

With ``TANDEMKV_PEER_ON_ONE_DEVICE=1`` the cache rank works on the device of the forward pass, a GPU
or the CPU. Link ``peer`` does all else as between two: the predictor's own copies of weights,
resident sets apart from the pool, rows that are sent, and flags. Link ``shared`` has its resident
sets in the pool then; with ``TANDEMKV_PEER_ON_ONE_DEVICE=apart`` it lays out its memory as for two
GPUs as well. So either path can be tested anywhere. Its times say nothing of two GPUs.
"""

import os

ONE_DEVICE_VARIABLE = "TANDEMKV_PEER_ON_ONE_DEVICE"
APART = "apart"


def is_peer_on_one_device() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get(ONE_DEVICE_VARIABLE) in ("1", APART)


def is_apart_on_one_device() -> bool:
    """Whether link ``shared`` is to be laid out as for two GPUs on one device."""
    return os.environ.get(ONE_DEVICE_VARIABLE) == APART
