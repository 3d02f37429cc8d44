"""Run the real launcher over fake ranks: ``fake_launch.py DIRECTORY CACHE_MODE SGLANG_MODE``."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from rich.console import Console

from tandemkv.cache_rank.protocol.errors import CacheRankLostError
from tandemkv.server.launch.child_process import ChildSpec
from tandemkv.server.launch.launcher import CacheRankLaunch, Launcher, LaunchPlan
from tandemkv.server.launch.liveness import Pulse
from tandemkv.server.launch.probes import ServerState
from tandemkv.server.launch.supervision import LaunchError, RestartRules

FAKE = Path(__file__).with_name("fake_rank.py")


def spec(name: str, directory: Path, mode: str) -> ChildSpec:
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-I", "-S", str(FAKE), name, str(directory), mode),
        env=dict(os.environ),
        log_path=directory / "run" / f"{name}.log",
        hang_signal=signal.SIGQUIT if name == "sglang" else None,
    )


def main() -> None:
    directory, cache_mode, sglang_mode, *rest = sys.argv[1:]
    root = Path(directory, *rest[1:])
    root.mkdir(exist_ok=True)
    run = root / "run"
    run.mkdir()

    def up(name: str) -> str | None:
        return None if (root / f"{name}.up").exists() else f"{name} is silent"

    def state() -> ServerState:
        reason = up("sglang")
        if (root / "taken").exists():
            return ServerState(True, False, "another server answers", is_other=True)
        return ServerState(reachable=reason is None, ready=reason is None, detail=reason or "")

    def pulse(name: str) -> Pulse:
        """Answer as a rank does whose state is in files; ``NAME.stalled`` holds seconds."""
        if (root / f"{name}.silent").exists():
            raise CacheRankLostError(f"{name} does not answer")
        stalled = root / f"{name}.stalled"
        stalled_s = float(stalled.read_text()) if stalled.exists() else 0.0
        return Pulse(is_ready=up(name) is None, stalled_s=stalled_s)

    def cache_rank(name: str) -> CacheRankLaunch:
        return CacheRankLaunch(
            spec=spec(name, root, cache_mode),
            standby=spec("standby", root, cache_mode) if has_standby else None,
            detail=lambda: up(name),
            pulse=lambda _: pulse(name),
        )

    has_standby = Path(directory, "has-standby").exists()
    # Of two tensor-parallel ranks each has one.
    names = ("cache", "second") if Path(directory, "two").exists() else ("cache",)

    def clean_up(keep_logs: bool) -> None:
        if not keep_logs:
            shutil.rmtree(run)

    plan = LaunchPlan(
        cache_ranks=tuple(cache_rank(name) for name in names),
        sglang=spec("sglang", root, sglang_mode),
        sglang_waits=Path(directory, "waits").exists(),
        ends_with_sglang=Path(directory, "nodes").exists(),
        server_state=state,
        banner="READY",
        sglang_pulse=lambda: pulse("sglang"),
        rules=RestartRules(
            hang_timeout_s=3.0,
            start_timeout_s=float(rest[0]) if rest else 20.0,
            max_restarts=2,
            first_backoff_s=0.1,
        ),
        drain_timeout_s=0.3,
        exit_timeout_s=2.0,
        clean_up=clean_up,
        watched=(str(run),),
        before_sglang=lambda: (root / "sglang.up").unlink(missing_ok=True),
    )
    try:
        Launcher(plan, Console(stderr=True), verbose=True).run()
    except LaunchError as error:
        print(f"LaunchError: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
