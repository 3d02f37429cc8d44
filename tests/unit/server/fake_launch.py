"""Run the real launcher over fake ranks: ``fake_launch.py DIRECTORY CACHE_MODE SGLANG_MODE``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from rich.console import Console

from tandemkv.server.child_process import ChildSpec
from tandemkv.server.launch import Launcher, LaunchError, LaunchPlan
from tandemkv.server.probes import ServerState

FAKE = Path(__file__).with_name("fake_rank.py")


def spec(name: str, directory: Path, mode: str) -> ChildSpec:
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-I", "-S", str(FAKE), name, str(directory), mode),
        env=dict(os.environ),
        log_path=directory / "run" / f"{name}.log",
    )


def main() -> None:
    directory, cache_mode, sglang_mode, *rest = sys.argv[1:]
    root = Path(directory)
    run = root / "run"
    run.mkdir()

    def up(name: str) -> str | None:
        return None if (root / f"{name}.up").exists() else f"{name} is silent"

    def state() -> ServerState:
        reason = up("sglang")
        if (root / "taken").exists():
            return ServerState(True, False, "another server answers", is_other=True)
        return ServerState(reachable=reason is None, ready=reason is None, detail=reason or "")

    def clean_up(keep_logs: bool) -> None:
        if not keep_logs:
            shutil.rmtree(run)

    plan = LaunchPlan(
        cache_rank=spec("cache", root, cache_mode),
        sglang=spec("sglang", root, sglang_mode),
        cache_rank_detail=lambda: up("cache"),
        server_state=state,
        banner="READY",
        start_timeout_s=float(rest[0]) if rest else 20.0,
        stop_timeout_s=0.3,
        clean_up=clean_up,
        guarded_dir=run,
        first_backoff_s=0.1,
        cache_rank_works=lambda: not (root / "hung").exists(),
    )
    try:
        Launcher(plan, Console(stderr=True), verbose=True).run()
    except LaunchError as error:
        print(f"LaunchError: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
