# SPDX-License-Identifier: Apache-2.0
"""Be the process of a host without HTTP: ``node_process.py ADDRESS CODE...``.

Its schedulers end with the codes once standard input ends; one with a negative code ends at once,
by that signal.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.inference_rank.sglang import nodes


def scheduler(code: int, goes_on: int) -> None:
    if code < 0:
        os.kill(os.getpid(), -code)
    os.read(goes_on, 1)
    os._exit(code)


def main() -> None:
    address, *codes = sys.argv[1:]
    goes_on = os.dup(0)  # multiprocessing closes that of its children
    context = multiprocessing.get_context("fork")
    for code in codes:
        context.Process(target=scheduler, args=(int(code), goes_on)).start()
    nodes.remove_temporary_files = lambda: None  # type: ignore[attr-defined]
    nodes.serve_schedulers(lambda: print("up", flush=True), address=LinkAddress.parse_node(address))
    os._exit(7)  # SGLang would start its HTTP server


if __name__ == "__main__":
    main()
