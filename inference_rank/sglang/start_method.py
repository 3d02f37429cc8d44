# SPDX-License-Identifier: Apache-2.0
"""How SGLang's HTTP process starts the others: on a CPU as copies of itself.

SGLang starts them as new programs, each of which imports the same 6,800 modules, for 9 to 11 s of
CPU time, and they load the tokenizer four times, for some 2 s each. That is most of a start, and of
the time in which a crash leaves the server unready. A copy has modules and tokenizer already. On a
GPU it stays as it is: a copy could not use a CUDA context of ours.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from typing import Any

import psutil

_LOG = logging.getLogger(__name__)
_TOKENIZER_ARGUMENTS = ("tokenizer_mode", "trust_remote_code", "revision", "tokenizer_backend")
"""What SGLang's processes load the tokenizer of a path with, as keywords."""
_Key = tuple[tuple[Any, ...], frozenset[tuple[str, Any]]]
_tokenizers: dict[_Key, Any] = {}
"""Those that were loaded before processes are copied."""


def choose_start_method(_result: None, server_args: Any, *_: Any, **__: Any) -> None:
    """Let processes be copies, where that is safe (AFTER hook of ``_set_envs_and_config``).

    A copy has the calling thread alone: what another thread has locked would stay locked. So the
    tokenizer, which they are to have, is loaded first.
    """
    if server_args.device == "cpu" and _num_threads() == 1:
        _load_tokenizer(server_args)
    threads = _num_threads()
    if server_args.device != "cpu" or threads != 1:
        _LOG.info("processes are started anew: device %s, %d threads", server_args.device, threads)
        return
    multiprocessing.set_start_method("fork", force=True)


def around_get_tokenizer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Give the tokenizer that this process, or the one that it is a copy of, has loaded already.

    What was not loaded with the same arguments is loaded as ever.
    """
    key = _key(args, kwargs)
    return _tokenizers[key] if key in _tokenizers else original(*args, **kwargs)


def _load_tokenizer(server_args: Any) -> None:
    if server_args.skip_tokenizer_init:
        return
    from sglang.srt.managers.tokenizer_manager import get_tokenizer

    # SGLang 0.5.23 fills in the tokenizer's path later.
    path = (server_args.tokenizer_path or server_args.model_path,)
    options = {name: getattr(server_args, name) for name in _TOKENIZER_ARGUMENTS}
    _tokenizers[_key(path, options)] = get_tokenizer(*path, **options)


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Key:
    return args, frozenset(kwargs.items())


def _num_threads() -> int:
    return int(psutil.Process().num_threads())  # those of libraries included
