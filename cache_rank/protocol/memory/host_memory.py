# SPDX-License-Identifier: Apache-2.0
"""Host memory that several processes map, named by file descriptors.

It is an anonymous file (``memfd_create``). Its pages exist from the start and its size is sealed,
so that no access can end in SIGBUS later.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandemkv.cache_rank.protocol.errors import ProtocolError, SettingsError

from .available_memory import available_bytes
from .descriptor_messages import TensorSpec

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_GIB = 1 << 30


def create_memory(name: str, nbytes: int, *, is_sparse: bool = False) -> int:
    """Return the descriptor of `nbytes` zeroed bytes of memory that can be mapped.

    With `is_sparse` pages are taken when they are written. Raises `SettingsError` if they are not
    to be had; nothing is left then.
    """
    free = available_bytes()
    if free is not None and nbytes > free and not is_sparse:
        raise SettingsError(
            f"shared memory of {name} needs {nbytes / _GIB:.2f} GiB, the host has "
            f"{free / _GIB:.2f} GiB available (control group included); lower --cache-tokens or "
            "--max-running-requests"
        )
    with _explained(name, nbytes):
        descriptor = os.memfd_create(f"tandemkv-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if is_sparse:
                os.ftruncate(descriptor, nbytes)
            else:
                os.posix_fallocate(descriptor, 0, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def map_memory(name: str, descriptor: int, nbytes: int) -> torch.Tensor:
    """Return ``[nbytes]`` uint8, mapped while it is used; the descriptor stays the caller's.

    Raises `SettingsError` if the process may not map as much.
    """
    try:
        return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    except OSError as error:
        raise SettingsError(
            f"memory of {name} ({nbytes} bytes) cannot be mapped: {error.strerror}; raise the "
            "process's limit of address space (ulimit -v)"
        ) from error


@contextmanager
def _explained(name: str, nbytes: int) -> Iterator[None]:
    advice = {
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
        errno.ENFILE: "the host has too many open files",
        errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
        errno.ENOSPC: "lower --cache-tokens or --max-running-requests",
        errno.ENOMEM: "lower --cache-tokens or --max-running-requests",
    }
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"shared memory of {name} ({nbytes} bytes) cannot be made: {error.strerror}; "
            + advice.get(error.errno or 0, "see memfd_create(2)")
        ) from error


def check_memory(spec: TensorSpec, descriptor: int) -> None:
    """Refuse what is no sealed file of exactly the bytes of `spec`; raises `ProtocolError`."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size != spec.nbytes:
        raise ProtocolError(
            f"mapped tensor {spec.name!r}: its memory has {found.st_size} bytes, "
            f"{spec.dtype}{list(spec.shape)} needs {spec.nbytes}; start both ranks with the same "
            "settings"
        )
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS:
        raise ProtocolError(f"mapped tensor {spec.name!r}: its size is not sealed")
