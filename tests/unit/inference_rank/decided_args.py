# SPDX-License-Identifier: Apache-2.0
"""SGLang's arguments as it leaves them where they were not passed, and it has decided itself."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups import overrides
from sglang.srt.server_args import ServerArgs


def decided_args(**decided: Any) -> ServerArgs:
    """Return arguments of a server on a CPU, of which SGLang has `decided` some by itself."""
    args = ServerArgs(model_path="dummy", device="cpu")
    if not hasattr(args, "resolve_once"):  # up to 0.5.18 it writes into the arguments
        for name, value in decided.items():
            setattr(args, name, value)
        return args
    args.resolve_once()
    overrides.declare_resolution(args, "a test", **decided)
    assert not any(getattr(args, name) == value for name, value in decided.items())
    return args
