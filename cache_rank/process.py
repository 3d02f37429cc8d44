# SPDX-License-Identifier: Apache-2.0
"""The cache rank as a process: signals, threads, memory, and the service loop of each engine.

SIGTERM ends it once its inference rank has gone, so that requests under way can finish where both
get the signal together (a pod); SIGINT, or a second signal, at once.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from tandemkv.cache_rank.engine.factory import make_policy
from tandemkv.cache_rank.protocol.errors import AlreadyServedError, SettingsError
from tandemkv.cache_rank.protocol.fault_points import enable_faults
from tandemkv.cache_rank.protocol.ipc import server_pid
from tandemkv.cache_rank.protocol.memory.mapped_tensors import Homes
from tandemkv.cache_rank.protocol.memory.shared_devices import engine_homes, far_gpu, one_gpu_homes
from tandemkv.cache_rank.protocol.models.model_spec import part_for, read_model_spec
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.protocol.settings.rank_settings import RankSettings
from tandemkv.cache_rank.protocol.threads import given_threads
from tandemkv.cache_rank.service.service import SharedEngineService

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_TURN_S = 0.01


def run_cache_rank(
    *,
    run_dirs: Sequence[Path],
    model_dir: Path,
    settings: RankSettings,
    max_rows: int,
    device: str = "cpu",
    on_ready: Callable[[], None] | None = None,
    drain_timeout_s: float = 0.0,
    standby: bool = False,
    rank: int = 0,
) -> None:
    """Serve until SIGTERM or SIGINT. Call it from the main thread.

    `run_dirs` are those of its engines, made before (`RunDir.create`): one for each inference rank
    that it serves. `settings` must equal the inference rank's, which has `max_rows` request rows at
    most. On `device` the engine works; cuda is the GPU behind those of the model
    (`shared_devices`). `on_ready` is called once the sockets of all engines answer.
    `drain_timeout_s` is the longest time after SIGTERM for the inference rank to go first. With
    `standby` everything is loaded, and then it waits until no other process serves the run
    directories. `rank` is its number, of ``settings.placement.num_cache_ranks``.

    Raises `SettingsError` if a run directory is missing or unusable, ``OMP_NUM_THREADS`` is no
    number, or the host has too little memory for ``capacity_tokens``; `UnsupportedModelError`,
    `PolicyError` or `CacheRankError` as `SharedEngineService` does.
    """
    placement = settings.placement
    _set_threads(is_beside_gpu=placement.host_engine)
    directories = [RunDir.open(path) for path in run_dirs]
    enable_faults("cache_rank", directories[0].path)
    _check_number(placement, rank, len(directories))
    homes = _homes(device, placement, rank)  # before CUDA takes memory of the model's GPU
    if standby:
        load_all(model_dir, settings, homes.here, rank)

    def make(number: int) -> SharedEngineService:
        return SharedEngineService(
            run_dir=directories[number],
            model_dir=model_dir,
            settings=settings,
            max_rows=max_rows,
            homes=homes,
            rank=rank * placement.engines_per_rank + number,
        )

    services = (_in_turn if standby else _make_all)(directories, make)
    stop = threading.Event()
    with _stopping_on_signals(
        stop, lambda: max(each.status().epoch for each in services), drain_timeout_s
    ):
        logger.info("policy %s, run directory %s", settings.selection.policy, run_dirs[0])
        _run_all(services, stop, on_ready)


def _check_number(placement: Placement, rank: int, num_directories: int) -> None:
    """Refuse a number that no cache rank has, and run directories that are not its engines'."""
    if rank >= placement.num_cache_ranks:
        raise SettingsError(
            f"rank={rank}: there are cache ranks 0 to {placement.num_cache_ranks - 1} with these "
            "--cache-ranks and --tp"
        )
    if num_directories != placement.engines_per_rank:
        raise SettingsError(
            f"run_dir: {num_directories} directories, and each cache rank serves "
            f"{placement.engines_per_rank} inference ranks with these --cache-ranks and --tp; give "
            "--run-dir once for each"
        )


def _homes(device: str, placement: Placement, rank: int) -> Homes:
    """Return where memory of cache rank `rank`, of those of all hosts, lies."""
    if placement.has_far_host:
        return one_gpu_homes(far_gpu(device, rank))
    if placement.host_engine:
        cpu = torch.device("cpu")
        return Homes.beside_gpu(torch.device(placement.model_device), here=cpu)
    here = rank % (placement.tp_per_node * placement.head_shards)  # on a GPU it has one engine
    return engine_homes(torch.device(device), here, placement.tp_per_node, placement.head_shards)


def _run_all(
    services: Sequence[SharedEngineService],
    stop: threading.Event,
    on_ready: Callable[[], None] | None,
) -> None:
    """Run all of `services` until `stop` is set, or one of them fails.

    Each has a thread: tensor-parallel ranks wait for each other in the middle of a step, so an
    engine that waits for its own rank must not hold up another.
    """

    def run(service: SharedEngineService) -> None:
        try:
            service.run(stop)
        finally:
            stop.set()

    first, *others = services
    with ThreadPoolExecutor(len(services), thread_name_prefix="engine") as pool:
        try:
            running = [pool.submit(run, each) for each in others]
            first.run(stop, on_ready)
        finally:
            stop.set()
    for each in running:
        each.result()


def _make_all(
    run_dirs: Sequence[RunDir], make: Callable[[int], SharedEngineService]
) -> list[SharedEngineService]:
    """Return what `make` makes for each of `run_dirs`, by number; if one fails, none stays open."""
    services = list[SharedEngineService]()
    try:
        for number in range(len(run_dirs)):
            services.append(make(number))
    except BaseException:
        for service in services:
            service.close()
        raise
    return services


def _in_turn(
    run_dirs: Sequence[RunDir], make: Callable[[int], SharedEngineService]
) -> list[SharedEngineService]:
    """As `_make_all`, once no live process serves `run_dirs`.

    Several may see that they are free: the locks that are taken decide, and who loses waits again.
    """
    while True:
        for run_dir in run_dirs:
            await_turn(run_dir)
        try:
            return _make_all(run_dirs, make)
        except AlreadyServedError as error:
            logger.info("waits again: %s", error)


def load_all(model_dir: Path, settings: RankSettings, device: torch.device, rank: int = 0) -> None:
    """Do what takes long before an epoch of cache rank `rank`: imports, compiling, CUDA."""
    whole = read_model_spec(model_dir, dtype="float32", kv_dtype=settings.cache.stored_dtype)
    model, _ = part_for(whole, settings.placement, rank)
    make_policy(model, settings, model_dir, device=device)
    torch.zeros(1, device=device)


def await_turn(run_dir: RunDir) -> None:
    """Return once no live process serves `run_dir`; a signal ends the process meanwhile."""
    told = None
    while True:
        other = server_pid(run_dir.control_socket)
        if other is None:
            return
        if other != told:
            told = other
            logger.info("loaded; process %d serves, its place is taken when it ends", other)
        time.sleep(_TURN_S)


@contextmanager
def _stopping_on_signals(
    stop: threading.Event, epoch: Callable[[], int], drain_timeout_s: float
) -> Iterator[None]:
    asked = threading.Event()

    def wait_for_inference_rank() -> None:
        deadline = time.monotonic() + drain_timeout_s
        while epoch() and time.monotonic() < deadline and not stop.wait(_TICK_S):
            pass
        stop.set()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        if number == signal.SIGINT or asked.is_set() or not epoch() or not drain_timeout_s:
            logger.info("%s: stopping", name)
            stop.set()
            return
        asked.set()
        logger.info(
            "%s: stopping once the inference rank has gone, in %g s at the latest",
            name,
            drain_timeout_s,
        )
        threading.Thread(target=wait_for_inference_rank, name="drain", daemon=True).start()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _set_threads(*, is_beside_gpu: bool) -> None:
    if is_beside_gpu:
        # Torch's threads spin while they wait for each other, several times a layer, on cores that
        # others want. The policy has threads of its own.
        torch.set_num_threads(1)
    given = given_threads()
    if given is not None and not is_beside_gpu:
        torch.set_num_threads(given)
