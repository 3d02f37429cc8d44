# SPDX-License-Identifier: Apache-2.0
"""What an inference rank hands to the holder of descriptors, and has back from it."""

from __future__ import annotations

import time
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import TandemKVError

from .descriptor_holder import HOLDER_TIMEOUT_S
from .descriptor_messages import connected, receive_descriptors
from .descriptor_socket import attach_all, send_tensors
from .mapped_tensors import Homes, MappedTensors


def let_hold(path: Path, tensors: MappedTensors, *, token: bytes, group: str) -> bool:
    """Let the holder at `path` have `tensors` as `group`, instead of what it had; False: none."""
    if not tensors.specs:
        return False
    try:
        with connected(path, HOLDER_TIMEOUT_S) as connection:
            send_tensors(connection, tensors, token=token, group=group)
            receive_descriptors(connection, time.monotonic() + HOLDER_TIMEOUT_S)
    except (OSError, TandemKVError):
        return False
    return True


def take_held(path: Path, *, token: bytes, group: str, homes: Homes | None = None) -> MappedTensors:
    """Map what the holder at `path` has as `group`; nothing if there is none, or no holder."""
    try:
        with connected(path, HOLDER_TIMEOUT_S) as connection:
            send_tensors(connection, token=token, group=group)
            message, descriptors = receive_descriptors(
                connection, time.monotonic() + HOLDER_TIMEOUT_S
            )
            return attach_all(message.specs, descriptors, homes)
    except (OSError, TandemKVError):
        return MappedTensors(homes)
