# SPDX-License-Identifier: Apache-2.0
"""For tests: transport ``peer`` on a machine that has no second GPU.

With ``TANDEMKV_PEER_ON_ONE_DEVICE=1`` the cache rank works on the device of the forward pass, a GPU
or the CPU, and all else is as between two: the predictor's own copies of weights, resident sets
apart from the pool, rows that are sent, and flags. So the path can be tested anywhere. It is slower
than ``local``, and its times say nothing of two GPUs.
"""

import os

ONE_DEVICE_VARIABLE = "TANDEMKV_PEER_ON_ONE_DEVICE"


def is_peer_on_one_device() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get(ONE_DEVICE_VARIABLE) == "1"
