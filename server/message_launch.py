# SPDX-License-Identifier: Apache-2.0
"""Link ``message``: the processes of each host, and the keys of both ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from rich.console import Console

from tandemkv.cache_rank.protocol.errors import SettingsError
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
from tandemkv.cache_rank.pump.far_service import FarPump
from tandemkv.cache_rank.pump.near_service import NearPump

from .cache_rank_launch import (
    INFERENCE_RANK_EXIT_S,
    MEANWHILE,
    SETTINGS_FILE,
    cache_rank_detail,
    cache_rank_launches,
    cache_rank_pulse,
    restart_rules,
)
from .child_process import ChildSpec
from .devices import cache_rank_device
from .launch import CacheRankLaunch, Launcher, LaunchPlan
from .ports import choose_port
from .preflight import check_policy, resolve_cache_rank
from .settings import ServeSettings
from .settings_sources import to_yaml
from .sglang_command import cache_rank_env

_LOOPBACK = "127.0.0.1"
FAR_FOLDER = "far"
"""Run directory of the cache rank's host in that of a launch with both ends here."""
_KEYS_FOLDER = "own-keys"
_CHILDREN_EXIT_S = 15.0


def with_own_link(settings: ServeSettings, run_dir: RunDir) -> ServeSettings:
    """Return settings with an address and keys for both ends on this host."""
    keys = run_dir.path / _KEYS_FOLDER
    make_keys(keys)
    port = choose_port(_LOOPBACK, 0)
    address = str(LinkAddress(_LOOPBACK, port))
    return settings.model_copy(update={"cache_rank_address": address, "link_keys": keys})


def message_launches(
    settings: ServeSettings, run_dir: RunDir, *, is_far_here: bool
) -> tuple[CacheRankLaunch, ...]:
    """Return the pump of this host and, with `is_far_here`, what is on the cache rank's host."""
    config = run_dir.path / SETTINGS_FILE
    server = (sys.executable, "-P", "-m", "tandemkv.server")
    env = cache_rank_env(os.environ, device="cpu")
    near = CacheRankLaunch(
        spec=ChildSpec(
            name="pump",
            argv=(*server, "pump", "--run-dir", str(run_dir.path), "--config", str(config)),
            env=env,
            log_path=run_dir.path / "pump.log",
        ),
        detail=partial(cache_rank_detail, run_dir),
        pulse=partial(cache_rank_pulse, run_dir),
    )
    if not is_far_here:
        return (near,)
    far = RunDir.create(run_dir.path / FAR_FOLDER)
    argv = (
        *server, "cache-rank", "--run-dir", str(far.path), "--config", str(config),
        "--address", str(settings.cache_rank_address),
    )  # fmt: skip
    return (
        CacheRankLaunch(
            spec=ChildSpec(
                name="cache rank", argv=argv, env=env, log_path=run_dir.path / "cache_rank.log"
            ),
            detail=partial(cache_rank_detail, far),
            pulse=partial(cache_rank_pulse, far),
        ),
        near,
    )


def run_pump(settings: ServeSettings, path: Path) -> None:
    """Be the pump on the inference rank's host, until SIGTERM or SIGINT.

    It serves once the cache rank lets it in: the two hosts may start in any order.

    Raises
    ------
    SettingsError
        If address or keys are missing, or unusable.
    HandshakeRefusedError
        If the cache rank does not let us in.
    CacheRankError
        If another process serves the run directory.
    """
    _log()
    keys = _keys(settings)
    assert settings.cache_rank_address is not None
    address = LinkAddress.parse_peer(settings.cache_rank_address)
    own, server = own_keys(keys, INFERENCE_RANK), public_key(keys, CACHE_RANK)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    await_entry(address, own, server, stop)
    if not stop.is_set():
        NearPump(RunDir.open(path), settings.rank_settings, address, own, server).run(stop)


def run_far_rank(
    settings: ServeSettings, path: Path, address: str, hosts: Sequence[str], console: Console
) -> None:
    """Serve inference ranks of other hosts at `address`, with a cache rank in `path`.

    Parameters
    ----------
    settings : ServeSettings
        Those of the inference rank.
    path : Path
        Run directory of the cache rank, on this host.
    address : str
        ``tcp://HOST:PORT`` of one interface.
    hosts : Sequence of str
        Addresses that inference ranks may come from; none: any.
    console : Console
        Told what goes on.

    Raises
    ------
    SettingsError, UnsupportedModelError
        Before anything is started.
    LaunchError
        If the cache rank did not become ready, or ended too often.
    """
    _log()
    settings = settings.model_copy(update={"transport": "message"})
    keys, where = _keys(settings), LinkAddress.parse(address)
    check_policy(settings.selection.policy)
    device = cache_rank_device(settings)
    settings, model_dir = resolve_cache_rank(settings, device, console.print)
    run_dir = RunDir.create(path)
    alone = settings.model_copy(
        update={
            "model": str(model_dir), "run_dir": run_dir.path, "cache_ranks": 1,
            "cache_rank_address": None, "link_keys": None,
        }
    )  # fmt: skip
    config = run_dir.path / SETTINGS_FILE
    config.write_text(to_yaml(alone), encoding="utf-8")
    door = Door(where, own_keys(keys, CACHE_RANK), allowed_keys(keys), hosts)
    serving = _Serving(FarPump(run_dir, settings.rank_settings, door).run)
    plan = LaunchPlan(
        # SIGTERM may go to both hosts at once: it waits for the inference rank to go, as it does on
        # one host.
        cache_ranks=cache_rank_launches(alone, run_dir, stop_signal=signal.SIGTERM),
        meanwhile=MEANWHILE,
        sglang=None,
        rules=restart_rules(settings, "cpu"),
        drain_timeout_s=settings.drain_timeout_s + INFERENCE_RANK_EXIT_S,
        exit_timeout_s=_CHILDREN_EXIT_S,
        clean_up=lambda _: run_dir.clear(),
        make_holder=serving.start,
        is_over=lambda: serving.has_ended,
        banner=f"cache rank at {door.address}",
    )
    Launcher(plan, console).run()


class _Serving:
    """A pump in a thread, as long as the launch lives."""

    def __init__(self, run: Callable[[threading.Event], None]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=run, args=(self._stop,), name="far pump")

    def start(self) -> Self:
        """Begin to serve."""
        self._thread.start()
        return self

    @property
    def has_ended(self) -> bool:
        """Whether it ended by itself, which ends the launch: the K/V went with it."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """End it, and with it the memory."""
        self._stop.set()
        self._thread.join()


def _keys(settings: ServeSettings) -> Path:
    if settings.link_keys is None:
        raise SettingsError(
            "link_keys: keys of both ends are needed; add --link-keys with the folder that "
            "`tandemkv link-keys` made"
        )
    return settings.link_keys


def _log() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
