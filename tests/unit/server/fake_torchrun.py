"""The module of torchrun over fake ranks: ``fake_torchrun.py DIRECTORY CACHE_MODE OPTION...``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandemkv.server import torchrun
from tandemkv.server.launch import cache_rank_launch, message_launch
from tandemkv.server.launch.child_process import ChildSpec
from tandemkv.server.launch.launcher import CacheRankLaunch
from tandemkv.server.launch.liveness import Pulse

FAKE = Path(__file__).with_name("fake_rank.py")
root, cache_mode, *arguments = sys.argv[1:]


def fake(name: str, mode: str) -> Callable[..., tuple[str, ...]]:
    argv = (sys.executable, "-I", "-S", str(FAKE), name, root, mode)
    return lambda *_, **__: argv


def cache_rank_detail(*_: Any) -> str | None:
    return None if Path(root, "cache.up").exists() else "cache is silent"


def pulse(*_: Any) -> Pulse:
    return Pulse(is_ready=True, stalled_s=0.0)


def pumps(settings: Any, run_dir: Any, **__: Any) -> tuple[CacheRankLaunch, ...]:
    def detail() -> str | None:
        return None if Path(root, "pump.up").exists() else "pump is silent"

    found = []
    for rank in range(len(settings.cache_rank_addresses)):
        argv, own = fake("pump", "serve")(), run_dir.of_rank(rank, create=True)
        log, env = own.path / "pump.log", torchrun.os.environ
        spec = ChildSpec(name="pump", argv=argv, env=env, log_path=log)
        found.append(CacheRankLaunch(spec=spec, detail=detail, pulse=pulse))
    return tuple(found)


def resolve_cache_rank(settings: Any, *_: Any) -> tuple[Any, Path]:
    placed = {"placement": settings.placement_on("cpu", "test")}
    return settings.model_copy(update=placed), Path(root)


def fake_server() -> None:
    # Of ranks that torchrun had before. A cache rank at an address may come before us.
    met = "pump.up" if "--cache-rank-address" in arguments else "cache.up"
    for name in (met, "sglang.up"):
        Path(root, name).unlink(missing_ok=True)
    from tandemkv.server.checks.preflight import ResolvedLaunch
    from tandemkv.server.launch import serve
    from tandemkv.server.launch.probes import ServerState

    def resolve(settings: Any, *_: Any) -> ResolvedLaunch:
        placed = settings.model_copy(update={"placement": settings.placement_on("cpu", "test")})
        spec: Any = type("Spec", (), {"dtype": "float32"})()
        return ResolvedLaunch(
            settings=placed, model_dir=Path(root), spec=spec, device="cpu", port=1
        )

    def state(*_: Any, **__: Any) -> ServerState:
        is_up = Path(root, "sglang.up").exists()
        return ServerState(reachable=is_up, ready=is_up, detail="sglang is silent")

    patched: Any = serve
    patched.resolve_launch = resolve
    patched.sglang_argv = fake("sglang", "serve")
    patched.cache_rank_detail = lambda _: "nobody serves here"
    patched.server_state = state
    patched.sglang_pulse = pulse
    patched.message_launches = pumps
    patched.start_report = lambda _: None


def main() -> None:
    launch: Any = cache_rank_launch
    launch.cache_rank_detail = cache_rank_detail
    launch.cache_rank_pulse = pulse
    launch.cache_rank_argv = fake("cache", cache_mode)
    message: Any = message_launch
    message.resolve_cache_rank = resolve_cache_rank
    place = "RANK" if "--cache-rank-address" in arguments else "LOCAL_RANK"
    if torchrun.os.environ[place] == "0":
        fake_server()
    sys.argv[1:] = arguments
    torchrun.main()


if __name__ == "__main__":
    main()
