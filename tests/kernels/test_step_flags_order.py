# SPDX-License-Identifier: Apache-2.0
"""Memory order of flags between two GPUs, in the PTX that Triton makes of them for Hopper.

What `tandemkv.kernels.step_flags` says of it: raises are releases at system scope, behind all
stores of the program and behind the kernel before; waits are acquiring loads at system scope.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tandemkv.kernels.triton_ops import step_flags

_HOPPER = GPUTarget("cuda", 90, 32)
_RELEASE = "atom.global.sys.release.exch"
_WORDS = {"flags": "*i32", "step": "*i32", "lost": "*i32"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def instructions(kernel: Any, given: dict[str, str], num_warps: int = 1, **constants: Any) -> str:
    """Return the PTX of a kernel; arguments in the order of its signature."""
    types = {n: "constexpr" if n in constants else given.get(n, "i32") for n in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    compiled = triton.compile(source, target=_HOPPER, options={"num_warps": num_warps})
    found: str = compiled.asm["ptx"]
    return found


@pytest.mark.parametrize("has_stamp", [False, True])
@pytest.mark.parametrize("chained", [False, True])
def test_a_raise_is_a_release_at_system_scope_behind_the_kernel_before(
    chained: bool, has_stamp: bool
) -> None:
    given = _WORDS | {"stamp": "*i32"}
    ptx = instructions(
        step_flags._raise_kernel, given, HAS_STAMP=has_stamp, BLOCK=8, CHAINED=chained
    )
    assert ptx.count(_RELEASE) == 1
    assert ptx.count("atom.") == 1
    assert (ptx.find("griddepcontrol.wait") >= 0) is chained
    if chained:  # neither the flag nor the words that decide on it are touched before
        wait = ptx.index("griddepcontrol.wait")
        assert wait < ptx.index("ld.global") < ptx.index(_RELEASE)


def test_rows_are_stored_before_their_flag_is_released() -> None:
    rows = {"rows": "*bf16", "out": "*bf16"}
    ptx = instructions(step_flags._send_kernel, _WORDS | rows, num_warps=2, BLOCK=1024)
    assert ptx.count(_RELEASE) == 1
    flag = ptx.index(_RELEASE)
    barrier = ptx.rindex("bar.sync", 0, flag)
    assert ptx.rindex("st.global") < barrier, "every thread's stores are behind the barrier"


@pytest.mark.parametrize("has_stamp", [False, True])
def test_a_wait_polls_with_acquiring_loads_and_leads_when_it_is_over(has_stamp: bool) -> None:
    given = _WORDS | {"timeout_ns": "i64", "stamp": "*i32"}
    ptx = instructions(
        step_flags._wait_kernel, given, HAS_STAMP=has_stamp, BLOCK=8, USE_ASM=True, CHAINED=True
    )
    assert ptx.count("ld.acquire.sys.global.u32") >= 2
    assert "trap" not in ptx
    last = ptx.rindex("ld.acquire.sys.global.u32")
    assert last < ptx.index("griddepcontrol.launch_dependents")
    assert "%globaltimer" in ptx
    # What the wait has found, `lost`, and the stamp: behind the last look.
    assert ptx.count("st.global") == 1 + has_stamp
    assert last < ptx.index("st.global")
    assert ptx.rindex("st.global") < ptx.index("griddepcontrol.launch_dependents")
