# SPDX-License-Identifier: Apache-2.0
"""Be the process of a host without HTTP: ``node_process.py ADDRESS CODE...``.

Its schedulers end with the codes once standard input ends; one with a negative code ends by that
signal, as soon as this process has seen all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from tandemkv.cache_rank.protocol.message.address import LinkAddress
from tandemkv.inference_rank.sglang import nodes


def scheduler(code: int, goes_on: int, seen: tuple[int, int]) -> None:
    os.close(seen[1])
    if code < 0:
        os.read(seen[0], 1)  # until the other end is closed everywhere
        os.kill(os.getpid(), -code)
    os.read(goes_on, 1)
    os._exit(code)


def main() -> None:
    address, *codes = sys.argv[1:]
    goes_on = os.dup(0)  # multiprocessing closes that of its children
    context, seen = multiprocessing.get_context("fork"), os.pipe()
    for code in codes:
        context.Process(target=scheduler, args=(int(code), goes_on, seen)).start()
    nodes.remove_temporary_files = lambda: None  # type: ignore[attr-defined]

    def launched() -> None:
        os.close(seen[1])
        print("up", flush=True)

    nodes.serve_schedulers(launched, address=LinkAddress.parse_node(address))
    os._exit(7)  # SGLang would start its HTTP server


if __name__ == "__main__":
    main()
