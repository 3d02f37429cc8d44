# SPDX-License-Identifier: Apache-2.0
"""Entry point of the SGLang plugin (group ``sglang.srt.plugins``).

SGLang calls `register` in its launcher and in every scheduler process, logs any exception
and goes on. So nothing here may be relied on silently: the attention backend proves, when it
is created, that every hook was applied (`sglang_contract.check_hooks_applied`), and without
this module the backend name ``tandemkv`` does not exist, so the server cannot start.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.settings.rank_settings import RUN_DIR_VARIABLE

BACKEND_NAME = "tandemkv"


def register() -> None:
    """Register backend and hooks. Dormant unless a run directory was handed over.

    Raises `SystemExit` if our backend is asked for without one, or without valid settings. (SGLang
    would swallow any other exception, and then say that the backend does not exist.)
    """
    if RUN_DIR_VARIABLE not in os.environ:
        if BACKEND_NAME in sys.argv:
            raise SystemExit(
                f"--attention-backend {BACKEND_NAME}: no cache rank to talk to, {RUN_DIR_VARIABLE} "
                "is not set; start both with `tandemkv serve MODEL`"
            )
        return
    from tandemkv.inference_rank.sglang.contract import check_contract
    from tandemkv.inference_rank.sglang.hooks import http_hooks, register_backend, scheduler_hooks

    check_contract()
    try:
        hooks = scheduler_hooks(BACKEND_NAME)
    except SettingsError as error:
        raise SystemExit(f"--attention-backend {BACKEND_NAME}: no cache rank: {error}") from error
    register_backend(BACKEND_NAME)
    if multiprocessing.parent_process() is None:
        hooks += http_hooks()
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)
