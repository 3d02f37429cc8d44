# SPDX-License-Identifier: Apache-2.0
"""Which versions of SGLang are taken, what each has under which name, and the adapting.

Nothing else in the plugin asks for a version. A function here does one thing that SGLang does
differently from version to version; what is the same in all of them is called where it is needed.
``docs/versions.md`` says what was run on which.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.metadata
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tandemkv.cache_rank.protocol.errors import ContractError

VERSIONS = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
RUN_ON_CPU, RUN_ON_GPU = (OLDEST, NEWEST), (OLDEST,)

# What changed, by the last number of the first version that has it.
_KV_RECORD = 19
"""A request's row and lengths moved from the request to `Req.kv`, which is there without a row."""
_NO_SERVER_ARGS = 19
"""`release_req` takes no `server_args`."""
_TRANSLATOR = 19
"""FlashInfer gets its slots from a `KVIndexTranslator`, no longer from the request table."""
_MODEL_HOOK = 19
"""What adjusts the arguments to a model is a function of a module, no longer their method."""
_OBSERVED_LOGITS = 19
"""Logits are also masked by a method that lets somebody see them before."""
_RAW_ARGS = 19
"""`ServerArgs` holds what was passed; what SGLang made of it is read through a view."""
_NOT_ABORTED = (18, 19)
"""A request whose client leaves is forgotten, and not aborted."""
_KEEPS_SENT = 20
"""A request whose client leaves is known until the scheduler has ended it."""
_KEY_IN_BAG = 20
"""SGLang's first request takes its key from the configuration, no longer from its arguments."""
_RANKS_IN_CONTEXT = 21
"""What binds a scheduler's threads reads the ranks from the context, no longer from arguments."""
_CHECKPOINT = 22
"""`release_kv_cache` takes `checkpoint` where it took `is_insert`."""
_EMPTY_LOGPROBS = 23
"""Who asks for no `token_ids_logprob` beside one who does has an empty tensor, no longer a list."""

_ARGS = "sglang.srt.server_args.ServerArgs"
_MODEL = "sglang.srt.arg_groups.model_hook"
_BOOTSTRAP = "sglang.srt.distributed.bootstrap"
BIND_THREADS = f"{_BOOTSTRAP}._init_cpu_threads_env"
_LOGITS_BIAS = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.apply_logits_bias"
_TOKEN_LOGPROBS = "sglang.srt.layers.logprob_processor.get_token_ids_logprobs"
_LAST = int(NEWEST.rpartition(".")[2])

# First and last number of versions, and what is relied on in them alone.
_SYMBOLS = (
    (17, 18, """
sglang.srt.managers.schedule_batch
    ReqKvInfo(kv_allocated_len)
    release_req(req, remaing_req_count, server_args, hisparse_coordinator)
sglang.srt.server_args
    ServerArgs._handle_model_specific_adjustments
    ServerArgs._resolved_attention_backends
"""),
    (19, _LAST, """
sglang.srt.managers.schedule_batch
    ReqKvInfo(req_pool_idx, kv_committed_len, kv_allocated_len)
    release_req(req, remaing_req_count, hisparse_coordinator)
sglang.srt.mem_cache.kv_index_translator
    KVIndexTranslator(req_to_token)
sglang.srt.arg_groups.model_hook
    handle_model_specific_adjustments(server_args)
    attention_backends_of(cfg)
sglang.srt.arg_groups.model_override_base
    resolving_view(server_args)
sglang.srt.sampling.sampling_batch_info
    SamplingBatchInfo.apply_logits_bias_with_observer(logits)
"""),
    (17, 19, """
sglang.srt.constants
    HEALTH_CHECK_RID_PREFIX
sglang.srt.managers.io_struct
    TokenizedGenerateReqInput(rid)
    BatchTokenizedGenerateReqInput(batch)
sglang.srt.managers.tokenizer_manager
    TokenizerManager._init_req_state(obj)
    TokenizerManager._discard_pending_req_states(obj)
    TokenizerManager._handle_batch_output(recv_obj)
    TokenizerManager._handle_abort_req(recv_obj)
"""),
    (17, 20, f"{_BOOTSTRAP}\n    _init_cpu_threads_env(tp_size, tp_rank)"),
    (21, _LAST, f"{_BOOTSTRAP}\n    _init_cpu_threads_env\n    get_parallel"),
    (17, 21, "sglang.srt.mem_cache.common\n    release_kv_cache(req, tree_cache, is_insert)"),
    (22, _LAST, "sglang.srt.mem_cache.common\n    release_kv_cache(req, tree_cache, checkpoint)"),
    (17, 22, """
sglang.srt.layers.logprob_processor
    get_token_ids_logprobs(logprobs, token_ids_logprobs, no_copy_to_cpu)
"""),
    # A backend says how long a step reads the request table, else rows are given away too early.
    (18, _LAST, "sglang.srt.layers.attention.base_attn_backend\n    SharedReadEnds.UNKNOWN"),
    (20, _LAST, "sglang.srt.entrypoints.http_server\n    get_serving"),
)  # fmt: skip


def check_version(version: str | None) -> int:
    """Return the last number of a version that is taken; a post-release counts as its release.

    Raises `ContractError` if `version` is not taken, or None: SGLang is not installed.
    """
    advice = f"install sglang=={OLDEST} (docs/versions.md says what was run on which version)"
    if version is None:
        raise ContractError(f"sglang is not installed; {advice}")
    release = re.sub(r"(\.post\d+)?(\+.*)?$", "", version)
    if release not in VERSIONS:
        raise ContractError(
            f"sglang=={version} is installed, and tandemkv takes {OLDEST} to {NEWEST}; {advice}"
        )
    return int(release.rpartition(".")[2])


def not_run(version: str, *, on_gpu: bool) -> str:
    """Return a sentence if `version` is taken, and was never run on such a device; else nothing."""
    run = RUN_ON_GPU if on_gpu else RUN_ON_CPU
    if version in run:
        return ""
    device = "a GPU" if on_gpu else "a CPU"
    return (
        f"SGLang {version} is taken, and was not run with tandemkv on {device}: that was "
        f"{' and '.join(run)} (docs/versions.md)"
    )


def installed() -> str | None:
    """Return the version of SGLang that is installed, if one is."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def symbols_of(number: int) -> dict[str, tuple[str, ...]]:
    """Return what is used of ``0.5.<number>`` and is not the same in all versions, by symbol."""
    parts = (text for first, last, text in _SYMBOLS if first <= number <= last)
    return parsed_symbols("\n".join(parts))


def parsed_symbols(text: str) -> dict[str, tuple[str, ...]]:
    """Return the parameters (or fields) of each symbol of `text`, by its whole name.

    A line without indent is a module, those behind it are ``name(parameters)`` in it, or comments.
    """
    found, module = dict[str, tuple[str, ...]](), ""
    for line in re.finditer(r"^(\S+)$|^ {4}([\w.]+)(?:\(([^)]*)\))?", text, re.MULTILINE):
        if line[1]:
            module = line[1]
        else:
            found[f"{module}.{line[2]}"] = tuple(re.findall(r"\w+", line[3] or ""))
    return found


@functools.cache
def _number() -> int:
    return check_version(installed())


@contextlib.contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Let a module or an object of SGLang's have `value` for an attribute meanwhile."""
    original, is_own = getattr(holder, name), name in vars(holder)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(holder, name, original)
        else:
            delattr(holder, name)


# -- requests ----------------------------------------------------------------------------


def row_of(req: Any) -> int | None:
    """Return the row of a request in the request table, None if it has none."""
    row = req.kv.req_pool_idx if _number() >= _KV_RECORD else req.req_pool_idx
    return None if row is None else int(row)


def committed(req: Any) -> int:
    """Return how many tokens of a request that has a row are stored, or will be by its passes."""
    return int(req.kv.kv_committed_len if _number() >= _KV_RECORD else req.kv_committed_len)


def set_stored(req: Any, length: int) -> None:
    """Let a request that has a row have `length` tokens, and no slots behind them."""
    (req.kv if _number() >= _KV_RECORD else req).kv_committed_len = length
    req.kv.kv_allocated_len = length


def give_up(req: Any, tree_cache: Any) -> None:
    """Give back row and slots of a request; the radix tree keeps nothing of it."""
    from sglang.srt.mem_cache.common import release_kv_cache

    kept = "checkpoint" if _number() >= _CHECKPOINT else "is_insert"
    release_kv_cache(req, tree_cache, **{kept: False})


def retract(req: Any, scheduler: Any) -> None:
    """Give back row and slots of a request that waits again, and forget its progress."""
    from sglang.srt.managers.schedule_batch import release_req

    more = {} if _number() >= _NO_SERVER_ARGS else {"server_args": scheduler.server_args}
    release_req(
        req=req,
        remaing_req_count=0,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
        **more,
    )


# -- pool and attention ------------------------------------------------------------------


def describe_buffers(pool: Any) -> None:
    """Let SGLang describe the K/V of its pool, which may have more rows than it has tokens.

    From 0.5.22 on SGLang compares the rows of the first layer with the pool's `size`. Layers may
    have different numbers; only what tandemkv refuses reads a description: transfers to other
    hosts, and memory that SGLang maps itself.
    """
    with _replaced(pool, "size", len(pool.k_buffer[0]) - int(pool.page_size)):
        pool._kv_buffer_descs = pool._build_kv_buffer_descs()
    pool._init_data_ptrs_and_strides()


def without_scales(pool: Any) -> None:
    """Enter that the K/V of SGLang's pool are not quantised."""
    for name in ("k_scale", "v_scale", "native_k_scale", "native_v_scale", "dq_k", "dq_v"):
        setattr(pool, f"{name}_buffer", None)


def end_of_reads() -> Any:
    """Return that rows and slots are read until a pass ends: beside it, the engine reads them.

    Asked for from 0.5.18 on. 0.5.17 lets its scheduler write from before a decode graph on: rows of
    requests that have ended, of which the engine may read another's slots. It selects for nobody
    then, and the next step waits until it has finished.
    """
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    return SharedReadEnds.UNKNOWN


def read_slots_from(backend: Any, slots: Any) -> None:
    """Let one of SGLang's FlashInfer backends read ``slots [rows, width]``, not the request table.

    Raises `ContractError` if SGLang's slots are not where its request table says.
    """
    backend.indices_updater_decode.req_to_token = slots
    if _number() < _TRANSLATOR:
        return
    own = copy.copy(backend.kv_index_translator)
    if own.is_translating:
        raise ContractError(
            "SGLang keeps K/V in its unified pool, whose slots are not those of the request table; "
            "serve without --enable-unified-memory"
        )
    own.req_to_token = slots
    backend.kv_index_translator = own


def proves_slots() -> bool:
    """Whether it has to be shown at start that `read_slots_from` is heeded: it fails silently."""
    return _number() >= _TRANSLATOR


def tensor_rank() -> int:
    """Return the place of this process in SGLang's tensor-parallel group."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def tensor_size() -> int:
    """Return how many processes that group has."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_size)


def tensor_group() -> Any:
    """Return torch's process group of CPUs of that group."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


def bind_threads_of_one(bind: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Bind a scheduler's threads as in a group of one process (AROUND hook of `BIND_THREADS`).

    Sums in shared memory, which SGLang sets up with that, are for processes of one host.
    """
    if _number() < _RANKS_IN_CONTEXT:
        return bind(*args, **kwargs | {"tp_size": 1, "tp_rank": 0})
    bootstrap: Any = importlib.import_module(_BOOTSTRAP)
    original = bootstrap.get_parallel
    with _replaced(bootstrap, "get_parallel", lambda: With(original(), tp_size=1, tp_rank=0)):
        return bind(*args, **kwargs)


# -- arguments ---------------------------------------------------------------------------


def resolved(args: Any) -> Any:
    """Return SGLang's arguments with the values that it serves by, to be read alone.

    `args` itself may have None where SGLang has decided, and text that it has parsed.
    """
    if _number() < _RAW_ARGS:
        return args
    from sglang.srt.arg_groups.model_override_base import resolving_view

    return resolving_view(args)


def adjustments() -> str:
    """Return the name of what adjusts SGLang's arguments to a model; it takes the arguments."""
    if _number() < _MODEL_HOOK:
        return f"{_ARGS}._handle_model_specific_adjustments"
    return f"{_MODEL}.handle_model_specific_adjustments"


@contextlib.contextmanager
def taken_for(args: Any, backend: str, other: str) -> Iterator[None]:
    """Let `adjustments` take one attention backend of `args` for another meanwhile."""
    if _number() < _MODEL_HOOK:
        holder, name = args, "_resolved_attention_backends"
    else:
        holder, name = importlib.import_module(_MODEL), "attention_backends_of"
    original = getattr(holder, name)

    def taken(*given: Any) -> tuple[Any, ...]:
        return tuple(other if found == backend else found for found in original(*given))

    with _replaced(holder, name, taken):
        yield


# -- log probabilities -------------------------------------------------------------------


def mended_logprobs() -> dict[str, Callable[..., Any]]:
    """Return an AROUND hook, by its target, on what ends SGLang's scheduler; from 0.5.23 on none.

    A pass of a request with `token_ids_logprob` and one without has a tensor for the one and a list
    for the other, and SGLang takes both for tensors (sgl-project/sglang#34719).
    """
    return {} if _number() >= _EMPTY_LOGPROBS else {_TOKEN_LOGPROBS: _with_tensors_alone}


def _with_tensors_alone(
    original: Callable[..., Any],
    logprobs: Any,
    token_ids_logprobs: Any,
    no_copy_to_cpu: bool = False,
) -> Any:
    values, ids = original(logprobs, token_ids_logprobs, no_copy_to_cpu)
    if no_copy_to_cpu:
        values = [logprobs.new_empty(0) if isinstance(found, list) else found for found in values]
    return values, ids


def masked_logits() -> tuple[str, ...]:
    """Return the names of what applies penalties and grammars' masks to logits."""
    both = (_LOGITS_BIAS, f"{_LOGITS_BIAS}_with_observer")
    return both[: 2 if _number() >= _OBSERVED_LOGITS else 1]


# -- HTTP --------------------------------------------------------------------------------


def held_ids() -> dict[str, Callable[..., Any]]:
    """Return AROUND hooks, by target, that hold ids of forgotten requests; from 0.5.20 on none."""
    from .request_ids import HeldIds

    number = _number()
    return {} if number >= _KEEPS_SENT else HeldIds(aborts=number in _NOT_ABORTED).hooks()


def with_key(send: Callable[[Any], Any], server_args: Any, key: str) -> Any:
    """Call `send`, SGLang's first request to itself, with a key that stands in no dump.

    `send` takes the server's arguments, of a server without a key; `key` is sent as
    ``Authorization: Bearer``.
    """
    if _number() < _KEY_IN_BAG:
        return send(With(server_args, api_key=key))
    from sglang.srt.entrypoints import http_server

    original, thread = http_server.get_serving, threading.get_ident()

    def get_serving() -> Any:
        # Others that ask meanwhile are the handlers of requests: for them there is no key.
        found = original()
        return With(found, api_key=key) if threading.get_ident() == thread else found

    with _replaced(http_server, "get_serving", get_serving):
        return send(server_args)


class With:
    """An object of SGLang's with some attributes changed."""

    def __init__(self, original: Any, **changed: Any) -> None:
        self.__dict__.update(changed, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)
