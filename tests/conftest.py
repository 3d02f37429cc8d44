# SPDX-License-Identifier: Apache-2.0
"""Seeds, the order of files, and tests that need GPUs, which --require-gpus N does not skip."""

import contextlib
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

SEED = 20251
_OWN_FOLDER = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpus",
        type=int,
        default=0,
        metavar="N",
        help="fail at once unless N GPUs are there, instead of skipping the tests that need them",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest makes its own
def pytest_configure(config: pytest.Config) -> None:
    # Sockets lie in `tmp_path`, and the path of one has 107 bytes at most. In pytest's own folder
    # it grows with the user's name and the number of runs.
    if config.option.basetemp is None and not hasattr(config, "workerinput"):
        config.option.basetemp = config.stash[_OWN_FOLDER] = tempfile.mkdtemp(prefix="tkv-")
    with contextlib.suppress(ImportError):  # GPU hosts run tests that do without it
        import hypothesis

        # An example's time says something of the machine beside it, nothing of the code.
        hypothesis.settings.register_profile("tandemkv", deadline=None)
        hypothesis.settings.load_profile("tandemkv")
    required, present = config.getoption("--require-gpus"), torch.cuda.device_count()
    if required > present:
        raise pytest.UsageError(
            f"--require-gpus {required}: torch {torch.__version__} sees {present} GPUs; install a "
            "CUDA build of torch on a machine with that many, or leave the option out"
        )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    own_folder = session.config.stash.get(_OWN_FOLDER, None)
    if own_folder is not None and exitstatus == 0:  # else somebody may look into it
        shutil.rmtree(own_folder, ignore_errors=True)


@pytest.hookimpl(trylast=True)  # what is left out does not count in the order
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    present = torch.cuda.device_count()
    for item in items:
        needed = gpus_needed(item)
        if needed > present:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, {present} present"))
    items[:] = spread_servers(items)


def spread_servers(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return `items` with the files that start servers at even distances among the others.

    A server has two busy processes, and of the others many wait. One of each kind at a time keeps
    two cores busy and no more. The last tenth has no servers: a long file there has one process
    finish late.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    servers = [path for path, same in files.items() if same[0].get_closest_marker("e2e")]
    order = [path for path in files if path not in servers]
    step = max(1, len(order) * 9 // 10 // max(1, len(servers)))
    for number, path in enumerate(servers):
        order.insert(number * (step + 1), path)
    return [item for path in order for item in files[path]]


def gpus_needed(item: pytest.Item) -> int:
    multi = item.get_closest_marker("multi_gpu")
    if multi is not None and not (multi.kwargs.get("or_one_device") and _is_on_one_device()):
        return int(multi.args[0] if multi.args else multi.kwargs["n"])
    return 1 if item.get_closest_marker("gpu") is not None else 0


def _is_on_one_device() -> bool:
    from tandemkv.cache_rank.protocol.memory.one_device import is_on_one_device

    return is_on_one_device()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start each test from the same random state, whatever ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
