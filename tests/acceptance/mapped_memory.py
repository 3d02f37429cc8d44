# SPDX-License-Identifier: Apache-2.0
"""What two processes map, read from outside: K/V, tables, resident sets and the engine's books."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rank_servers import Server, model_dir

_PREFIX = "/memfd:tandemkv-"


def scheduler_pid(server: Server) -> int:
    """Process id of SGLang's scheduler, which holds all mapped memory."""
    for process in server.processes():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("sglang::sched"):
                return process.pid
    raise AssertionError([process.name() for process in server.processes()])


def mapped(pid: int) -> dict[str, mmap.mmap]:
    """Map what a process holds, by name, for reading. The last one of a name counts."""
    found = {}
    for path in sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            target = str(path.readlink())
            if target.startswith(_PREFIX):
                name = target.removeprefix(_PREFIX).removesuffix(" (deleted)")
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    found[name] = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
                finally:
                    os.close(descriptor)
    return found


def kv_inode(server: Server) -> str:
    """Which memory the K/V lie in."""
    for process in server.processes():
        with contextlib.suppress(psutil.Error, OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if "memfd:tandemkv-kv " in line:
                    return line.split()[4]
    raise AssertionError("nobody has K/V mapped")


class Memory:
    """Views of a server's mapped memory.

    Parameters
    ----------
    server : Server
        With a float32 model and pages of one token.
    num_resident, num_rows : int
        R, and rows of the request table, padding included.
    """

    def __init__(self, server: Server, *, num_resident: int, num_rows: int = 7) -> None:
        config = json.loads((Path(model_dir()) / "config.json").read_text())
        layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        maps = mapped(scheduler_pid(server))
        kv = np.frombuffer(maps["kv"], np.float32).reshape(layers, 2, -1, heads, dim)
        self.num_slots = kv.shape[2] - num_rows * num_resident
        self.pool = kv[:, :, : self.num_slots]
        shape = (layers, 2, num_rows, num_resident, heads, dim)
        self.resident = kv[:, :, self.num_slots :].reshape(shape)
        self.table = np.frombuffer(maps["req_to_token"], np.int32).reshape(num_rows, -1)
        books = np.frombuffer(maps["resident_positions"], np.int32)
        self.positions = books.reshape(-1, num_rows, heads, num_resident)

    def snapshot(self) -> tuple[Any, Any]:
        """Copy what tells which rows a request has used."""
        return self.table.copy(), self.positions.copy()

    def changed_rows(self, before: tuple[Any, Any]) -> list[int]:
        """Rows that were used since `snapshot`; row 0 is padding."""
        table, positions = before
        is_used = (self.table != table).any(-1) | (self.positions != positions).any((0, 2, 3))
        return [int(row) for row in np.nonzero(is_used)[0] if row]

    def mismatches(self, row: int) -> int:
        """Resident K/V that are not those of the pool at the position that the books name.

        Only the first layers have no books, being exact. The request of `row` has not given its
        slots back.
        """
        wrong, num_exact = 0, len(self.resident) - len(self.positions)
        for book, layer in enumerate(range(num_exact, len(self.resident))):
            for head in range(self.positions.shape[2]):
                positions = self.positions[book, row, head]
                (filled,) = np.nonzero(positions >= 0)
                slots = self.table[row, positions[filled]]
                held = self.resident[layer, :, row, filled, head]
                wanted = self.pool[layer][:, slots, head].swapaxes(0, 1)
                wrong += int((held != wanted).any((-1, -2)).sum())
        return wrong


def resident_mismatches(server: Server, ids: list[int], *, num_resident: int) -> dict[str, int]:
    """Run one request alone, and compare its resident sets with the pool.

    Returns ``compared``, slots per KV head and layer, and ``mismatches``.
    """
    memory = Memory(server, num_resident=num_resident)
    before = memory.snapshot()
    server.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 24, "temperature": 0, "ignore_eos": True},
    )
    rows = memory.changed_rows(before)
    assert len(rows) == 1, f"one request has changed rows {rows}"
    compared = int((memory.positions[:, rows[0]] >= 0).sum())
    return {"compared": compared, "mismatches": memory.mismatches(rows[0])}
