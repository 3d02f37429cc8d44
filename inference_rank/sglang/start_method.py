# SPDX-License-Identifier: Apache-2.0
"""How SGLang's HTTP process starts the others: on a CPU as copies of itself.

SGLang starts them as new programs, each of which imports the same 6,800 modules, for 9 to 11 s of
CPU time. That is most of a start, and of the time in which a crash leaves the server unready. A
copy has them already. On a GPU it stays as it is: a copy could not use a CUDA context of ours.
"""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any

import psutil

_LOG = logging.getLogger(__name__)


def choose_start_method(_result: None, server_args: Any, *_: Any, **__: Any) -> None:
    """Let processes be copies, where that is safe (AFTER hook of ``_set_envs_and_config``).

    A copy has the calling thread alone: what another thread has locked would stay locked.
    """
    threads = psutil.Process().num_threads()  # those of libraries included
    if server_args.device != "cpu" or threads != 1:
        _LOG.info("processes are started anew: device %s, %d threads", server_args.device, threads)
        return
    multiprocessing.set_start_method("fork", force=True)
