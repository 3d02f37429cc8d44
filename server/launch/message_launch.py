# SPDX-License-Identifier: Apache-2.0
"""Link ``message``: the processes of each host, and the keys of both ends."""

from __future__ import annotations

import contextlib
import glob
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.heartbeat import request_status
from tandemkv.cache_rank.protocol.memory.shared_devices import far_gpu, one_gpu_homes
from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.cache_rank.protocol.message.door import Door, await_entry
from tandemkv.cache_rank.protocol.message.keys import (
    CACHE_RANK,
    INFERENCE_RANK,
    allowed_keys,
    make_keys,
    own_keys,
    public_key,
)
from tandemkv.cache_rank.protocol.run_dir import RunDir
from tandemkv.cache_rank.protocol.settings.placement import Placement
from tandemkv.cache_rank.pump.far_service import FarPump
from tandemkv.cache_rank.pump.near_service import NearPump
from tandemkv.server.checks.ports import choose_port
from tandemkv.server.checks.preflight import resolve_cache_rank
from tandemkv.server.checks.shared_gpus import check_shared_gpus
from tandemkv.server.cli.start_view import StartProgress
from tandemkv.server.plan.devices import cache_rank_device
from tandemkv.server.settings.launch_settings import ServeSettings
from tandemkv.server.settings.sources import to_yaml

from .cache_rank_launch import (
    INFERENCE_RANK_EXIT_S,
    PULSE_TIMEOUT_S,
    SETTINGS_FILE,
    cache_rank_detail,
    cache_rank_launch,
    cache_rank_pulse,
    clean_run_dir,
    log_to_stderr,
    restart_rules,
    want_logs,
)
from .child_process import ChildSpec
from .launcher import CacheRankLaunch, Launcher, LaunchPlan
from .liveness import Pulse
from .run_dir_lock import lock_run_dir
from .sglang_command import cache_rank_argv, cache_rank_env
from .supervision import LaunchError

_LOOPBACK, _SEEN_GPUS = "127.0.0.1", "CUDA_VISIBLE_DEVICES"
_PUMP_ENV = {"CUDA_MPS_CLIENT_PRIORITY": "0"}
"""The forward pass waits for its pump, whose kernels are short: neither goes before the other."""
_LOADING, _AT_ONCE = "CUDA_MODULE_LOADING", "EAGER"
FAR_FOLDER = "far"
"""Folder of each cache rank's run directory, in that of a launch with both ends here."""
_KEYS_FOLDER = "own-keys"
_CHILDREN_EXIT_S = 15.0


def with_own_link(settings: ServeSettings, run_dir: RunDir) -> ServeSettings:
    """Return settings with keys, and an address of each cache rank, for both ends on this host.

    No address has `settings.port`, which SGLang binds later.
    """
    keys = run_dir.path / _KEYS_FOLDER
    make_keys(keys)
    count, ports = settings.rank_settings.placement.num_cache_ranks, set[int]()
    while len(ports) < count:
        ports |= {choose_port(_LOOPBACK, 0)} - {settings.port}
    addresses = ",".join(str(LinkAddress(_LOOPBACK, port)) for port in sorted(ports))
    return settings.model_copy(update={"cache_rank_address": addresses, "link_keys": keys})


def message_launches(
    settings: ServeSettings, run_dir: RunDir, *, is_far_here: bool
) -> tuple[CacheRankLaunch, ...]:
    """Return this host's pump of each cache rank; with `is_far_here` the cache ranks come first."""
    cache_ranks, pumps = list[CacheRankLaunch](), list[CacheRankLaunch]()
    placement = settings.rank_settings.placement
    env = cache_rank_env(os.environ, device=placement.model_device)
    for rank, address in enumerate(settings.cache_rank_addresses):
        if is_far_here:
            own = RunDir.create(run_dir.path / FAR_FOLDER / str(rank))  # another host, in effect
            words = ("cache-rank", "--address", address)
            there = env | _other_gpu(placement, env, rank)
            pulse: Callable[[int], Pulse] = partial(_far_pulse, own)
            cache_ranks.append(_launch("cache rank", words, rank, own, run_dir, there, pulse))
        own = run_dir.of_rank(rank, create=True)
        pulse = partial(cache_rank_pulse, (own,))
        pumps.append(_launch("pump", ("pump",), rank, own, run_dir, env | _PUMP_ENV, pulse))
    return (*cache_ranks, *pumps)


def _other_gpu(placement: Placement, environ: Mapping[str, str], rank: int) -> dict[str, str]:
    """Return what lets cache rank `rank` see a GPU that no inference rank has; nothing on a CPU."""
    if placement.model_device != "cuda":
        return {}
    seen = environ.get(_SEEN_GPUS, "").split(",")
    number = placement.tp_size + rank
    return {_SEEN_GPUS: seen[number].strip() if number < len(seen) else str(number)}


def _far_pulse(own: RunDir, _pid: int) -> Pulse:
    """Ask the process that holds the K/V of a cache rank, which it starts and watches itself.

    Both have to be there for it to be ready. Raises `CacheRankError` if it does not answer.
    """
    reply = request_status(own.inference_socket, PULSE_TIMEOUT_S)
    is_ready = cache_rank_detail(own) is None
    return Pulse(is_ready=is_ready, stalled_s=reply.values["stalled_s"])


def _launch(
    name: str, words: tuple[str, ...], rank: int, own: RunDir, run_dir: RunDir,
    env: dict[str, str], pulse: Callable[[int], Pulse],
) -> CacheRankLaunch:  # fmt: skip
    """Return a process of cache rank `rank` in `own`, for settings and logs in `run_dir`."""
    config, number = run_dir.path / SETTINGS_FILE, rank or ""
    argv = cache_rank_argv(run_dirs=[own.path], config=config, rank=rank, words=words)
    return CacheRankLaunch(
        spec=ChildSpec(
            name=f"{name} {number}".rstrip(),
            argv=argv,
            env=env,
            log_path=run_dir.path / f"{name.replace(' ', '_')}{number}.log",
        ),
        detail=partial(cache_rank_detail, own),
        pulse=pulse,
    )


def run_pump(settings: ServeSettings, path: Path, rank: int = 0) -> None:
    """Be the pump of cache rank `rank` on the inference rank's host, until SIGTERM or SIGINT.

    It serves once the cache rank lets it in: the two hosts may start in any order.

    Raises `SettingsError` if address or keys are missing or unusable, `HandshakeRefusedError` if
    the cache rank does not let us in, `CacheRankError` if another process serves the run directory.
    """
    log_to_stderr()
    torch.set_num_threads(1)  # it copies; who computes beside it has the other cores
    keys = _keys(settings)
    address = LinkAddress.parse_peer(settings.cache_rank_addresses[rank])
    own, server = own_keys(keys, INFERENCE_RANK), public_key(keys, CACHE_RANK)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    await_entry(address, own, server, stop)
    if not stop.is_set():
        run_dir, ours = RunDir.open(path), settings.rank_settings
        model = torch.device(ours.placement.model_device, rank // ours.placement.head_shards)
        with _loading_at_once():
            homes = one_gpu_homes(model)
        NearPump(run_dir, ours, address, own, server, rank=rank, homes=homes).run(stop)


def run_far_rank(
    settings: ServeSettings, path: Path, address: str, hosts: Sequence[str], console: Console,
    rank: int = 0, *, verbose: bool = False,
) -> None:  # fmt: skip
    """Serve inference ranks of other hosts at `address`, with a cache rank in `path`.

    `settings` are those of the inference rank; without `run_dir` in them `path` is removed at the
    end. `address` is ``tcp://HOST:PORT`` of one interface. Inference ranks may come from `hosts`;
    none: from any.

    Raises `SettingsError` or `UnsupportedModelError` before anything is started, `CacheRankError`
    if the address cannot be bound, `LaunchError` if the cache rank did not become ready, or ended
    too often.
    """
    log_to_stderr()
    torch.set_num_threads(1)  # the pump's; the cache rank is another process
    # Whoever reaches the address takes a descriptor with each connection, before keys are seen.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    keys, where = _keys(settings), LinkAddress.parse(address)
    with _loading_at_once():
        settings, model_dir, device = _resolve_far(settings, rank, console)
        homes = one_gpu_homes(far_gpu(device, rank))
    check_shared_gpus(settings.rank_settings.placement)
    with lock_run_dir(settings.run_dir and path) as lock:
        if cache_rank_detail(RunDir(path.absolute())) is None:
            raise SettingsError(f"run_dir={path}: another cache rank is there; give each its own")
        door = Door(where, own_keys(keys, CACHE_RANK), allowed_keys(keys), hosts)
        run_dir = RunDir.create(path)
        pump = PumpThread(FarPump(run_dir, settings.rank_settings, door, rank, homes), run_dir)
        launch = cache_rank_launch(
            _alone(settings, model_dir, run_dir), run_dir, (run_dir,), rank,
            # SIGTERM may go to both hosts at once: it waits for the inference rank to go, as it
            # does on one host.
            signal.SIGTERM,
        )  # fmt: skip
        plan = _far_plan(settings, launch, pump, run_dir, device)
        plan = replace(plan, lock=lock, banner=escape(f"cache rank at {door.address}"))
        Launcher(plan, console, verbose=verbose).run()
    if pump.error is not None:
        raise LaunchError(f"the pump ended, and the K/V with it: {pump.error}") from pump.error


def _alone(settings: ServeSettings, model_dir: Path, run_dir: RunDir) -> ServeSettings:
    """Return what the cache rank reads, of which its settings file is written."""
    alone = settings.model_copy(
        update={
            "model": str(model_dir), "run_dir": run_dir.path, "cache_rank_address": None,
            "cache_ranks": settings.rank_settings.placement.num_cache_ranks, "link_keys": None,
            "sglang_args": (),  # may hold a key
        }
    )  # fmt: skip
    (run_dir.path / SETTINGS_FILE).write_text(to_yaml(alone), encoding="utf-8")
    return alone


def _far_plan(
    settings: ServeSettings, launch: CacheRankLaunch, pump: PumpThread, run_dir: RunDir,
    device: str,
) -> LaunchPlan:  # fmt: skip
    """Return what `run_far_rank` starts: a cache rank, with a pump in this process."""
    is_ours = settings.run_dir is None
    return LaunchPlan(
        cache_ranks=(launch,),
        sglang=None,
        rules=restart_rules(settings, device),
        drain_timeout_s=settings.drain_timeout_s + INFERENCE_RANK_EXIT_S,
        exit_timeout_s=_CHILDREN_EXIT_S,
        clean_up=lambda keep_logs: clean_run_dir(run_dir, is_ours=is_ours, keep_logs=keep_logs),
        # Whoever starts us again after SIGKILL may be in a directory that was given by then.
        watched=(*run_dir.made, glob.escape(str(run_dir.path))) if is_ours else (),
        holder=pump.serving,
        is_over=lambda: not pump.is_alive(),  # it ended by itself, and the K/V went with it
    )


@contextlib.contextmanager
def _loading_at_once() -> Iterator[None]:
    """Let CUDA, if it begins here, load all of torch's kernels: see `stream_lanes`."""
    is_ours = _LOADING not in os.environ
    os.environ.setdefault(_LOADING, _AT_ONCE)
    try:
        yield
    finally:
        if is_ours:  # processes that are started from here shall not
            os.environ.pop(_LOADING, None)


def _resolve_far(
    settings: ServeSettings, rank: int, console: Console
) -> tuple[ServeSettings, Path, str]:
    """Return what cache rank `rank` of another host is to be told, its model, and its device."""
    settings = settings.model_copy(update={"transport": "message"})
    device = cache_rank_device(settings)
    settings, model_dir = resolve_cache_rank(settings, device, StartProgress(console).tell)
    last = settings.rank_settings.placement.num_shards - 1
    if rank > last:
        raise SettingsError(
            f"rank={rank}: these settings have cache ranks 0 to {last}; give the inference rank's "
            "with --config, its cache_rank_address with one for each"
        )
    return settings, model_dir, device


class PumpThread(threading.Thread):
    """A pump that serves as long as the launch lives; the memory ends with it."""

    def __init__(self, pump: FarPump, run_dir: RunDir) -> None:
        super().__init__(name="far pump")
        self._pump, self._run_dir, self._stop_asked = pump, run_dir, threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Serve until asked to stop."""
        try:
            self._pump.run(self._stop_asked)
        except BaseException as error:
            self.error = error
            want_logs(self._run_dir)
            raise

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Run it during the body."""
        self.start()
        try:
            yield
        finally:
            self._stop_asked.set()
            self.join()


def _keys(settings: ServeSettings) -> Path:
    if settings.link_keys is None:
        raise SettingsError(
            "link_keys: keys of both ends are needed; add --link-keys with the folder that "
            "`tandemkv link-keys` made"
        )
    return settings.link_keys
