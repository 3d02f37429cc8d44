# SPDX-License-Identifier: Apache-2.0
"""Run the command line with SGLang's overlap scheduler on a CPU, where `serve` leaves it out."""

from __future__ import annotations

from tandemkv.server import sglang_command
from tandemkv.server.__main__ import main

if __name__ == "__main__":
    sglang_command._CPU_FLAGS = tuple(
        flag for flag in sglang_command._CPU_FLAGS if flag != "--disable-overlap-schedule"
    )
    main()
