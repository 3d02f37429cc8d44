# SPDX-License-Identifier: Apache-2.0
"""The directory through which the ranks of one machine find and trust each other.

It holds the ipc sockets, the token and whatever else a launch makes. Nobody but its owner can enter
it: that, not the token, is what keeps other users of the machine out.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from functools import cached_property
from pathlib import Path

from .errors import SettingsError
from .fault_points import FAULTS_FILE

TOKEN_BYTES = 32
MAX_SOCKET_PATH_BYTES = 107
"""What fits into ``sockaddr_un.sun_path`` on Linux, the closing zero not counted."""

_SOCKET_NAMES = tuple(
    f"{name}.sock" for name in ("control", "heartbeat", "inference", "memory", "holder")
)
_TEMPORARY, _METRICS = "sglang-tmp", "sglang-metrics"
_OF_SGLANG = (_TEMPORARY, _METRICS, "sglang-store-*", "sglang-loads*.shm")
_LONGEST_NAMES = (*_SOCKET_NAMES, f"{_TEMPORARY}/tmp01234567")
"""The last is a socket of SGLang's, whose name it gets from the standard library."""
_MADE = (
    *_SOCKET_NAMES,
    *(f"{name}.lock" for name in _SOCKET_NAMES),
    *("token", ".token-*", "epoch", "epoch.new", "cache_rank.yaml*", "keep-logs", FAULTS_FILE),
    *(f"own-keys/{end}.key*" for end in ("cache_rank", "inference_rank")),  # of link message
    *_OF_SGLANG,
)
"""What a launch makes, as patterns; logs apart, which are for reading."""
_OF_ENGINES = ("tp[1-9]", "tp[1-9][0-9]", "far/[0-9]", "far/[0-9][0-9]")
"""Run directories in it, of the engines but the first (`RunDir.of_rank`) and of link message."""
_FOLDERS = (
    *(f"far/[0-9]*/{name}*.log*" for name in ("cache_rank", "standby")),  # nobody is told of them
    *(f"{name}/" for name in (*_OF_ENGINES, "far", "own-keys")),
)
_LOCK = "launcher.lock"
_PREFIX = "tandemkv-"


class RunDir:
    """An existing run directory. Use `create` or `open`, which check owner and mode of `path`.

    Attributes
    ----------
    control_socket, memory_socket : Path
        Where the cache rank takes control messages, and descriptors of mapped tensors.
    heartbeat_socket, inference_socket : Path
        Where the cache rank answers heartbeats and status requests, and the inference rank these.
    holder_socket : Path
        Where the launcher holds descriptors of mapped tensors.
    temporary, metrics : Path
        Folders for temporary files of SGLang's processes (``TMPDIR``), and in which they share
        metrics; not made here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.control_socket, self.heartbeat_socket, self.inference_socket, *others = (
            path / name for name in _SOCKET_NAMES
        )
        self.memory_socket, self.holder_socket = others
        self.temporary, self.metrics = path / _TEMPORARY, path / _METRICS

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @classmethod
    def create(cls, path: Path | str | None = None) -> RunDir:
        """Make the directory and its token; an existing directory of ours keeps its token.

        `path` is made with mode 0700 if missing; by default it is a fresh directory in
        `usual_place`. Raises `SettingsError` if it belongs to somebody else, is open to group or
        others, is a symbolic link, cannot be made, or is too long for a socket.
        """
        try:
            if path is None:
                place = usual_place()
                _check_place(place)
                path = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
            directory = whole_path(path)
            _check_length(directory)
            for folder in (*reversed(directory.parents), directory):
                if not folder.is_dir():
                    with contextlib.suppress(FileExistsError):  # the check says more of it
                        folder.mkdir(mode=0o700)
            _check_private(directory, is_directory=True)
            cls(directory)._create_token()
        except OSError as error:
            raise SettingsError(f"run_dir={path}: cannot be made: {error}") from error
        return cls.open(directory)

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """Return an existing run directory.

        Raises `SettingsError` if it does not exist, is not private to us, or holds no usable token.
        """
        directory = whole_path(path)
        _check_length(directory)
        _check_private(directory, is_directory=True)
        run_dir = cls(directory)
        _ = run_dir.token
        return run_dir

    def of_rank(self, rank: int, *, create: bool = False) -> RunDir:
        """Return where engine `rank`, of all cache ranks, meets its inference rank.

        The first one's is this directory; the others have one each inside, with a token, sockets
        and epochs of their own. Those of the first tensor-parallel rank come first. Without
        `create` it is not looked at: it is for its user to miss. Raises `SettingsError` as `create`
        does.
        """
        if not rank:
            return self
        path = self.path / f"tp{rank}"
        return RunDir.create(path) if create else RunDir(path)

    @property
    def made(self) -> tuple[str, ...]:
        """Patterns of all paths that a launch makes, logs apart, in the order in which they go.

        Those that end with a slash are of folders, which go if they are empty by then: there may be
        some of these names, or things in them, that no launch made. The lock goes last: the next
        launch begins as soon as it is gone.
        """
        inside = list[str]()
        for pattern in self._patterns(_OF_ENGINES):
            for name in glob.glob(pattern):  # noqa: PTH207 (absolute)
                with contextlib.suppress(SettingsError):  # it is none of ours
                    inside += RunDir.open(name)._patterns((*_MADE, _LOCK))
        return (*inside, *self._patterns((*_MADE, *_FOLDERS, _LOCK)))

    @cached_property
    def token(self) -> bytes:
        """The shared secret, 32 bytes; read once.

        Raises `SettingsError` if the file is missing, not private to us, or of another length.
        """
        path = self.path / "token"
        _check_private(path, is_directory=False)
        token = path.read_bytes()
        if len(token) != TOKEN_BYTES:
            raise SettingsError(
                f"{path}: {len(token)} bytes, must be {TOKEN_BYTES}; delete it and restart"
            )
        return token

    @property
    def instance(self) -> str:
        """Name of the server that uses this directory, for whoever may know it.

        Derived from the token, which cannot be found from it.
        """
        return hashlib.sha256(b"instance" + self.token).hexdigest()[:16]

    def next_epoch(self) -> int:
        """Return a number that no epoch of this directory had, also across restarts.

        Traffic is told apart by it: a cache rank that comes back must not reuse one.
        """
        path = self.path / "epoch"
        last = int(path.read_text()) if path.exists() else 0
        fresh = path.with_suffix(".new")
        fresh.write_text(str(last + 1))
        fresh.replace(path)
        return last + 1

    def remove(self) -> None:
        """Delete the directory with all that it holds."""
        self.clear()
        shutil.rmtree(self.path, ignore_errors=True)

    def clear(self) -> None:
        """Remove what a launch makes, logs apart; what else is there stays, and so does it."""
        _remove(self.made)

    def clear_sglang(self) -> None:
        """Remove what SGLang's processes leave when they are killed.

        Their names hold process ids, which come again: the next server would read it as its own.
        """
        _remove(self._patterns(_OF_SGLANG))

    def _patterns(self, names: tuple[str, ...]) -> tuple[str, ...]:
        folder = glob.escape(str(self.path))
        return tuple(f"{folder}/{name}" for name in names)

    def _create_token(self) -> None:
        # Written aside and linked into place, so that nobody ever reads half a token and of
        # two processes that start together one wins.
        handle, name = tempfile.mkstemp(dir=self.path, prefix=".token-")
        draft = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(TOKEN_BYTES))
            with contextlib.suppress(FileExistsError):
                (self.path / "token").hardlink_to(draft)
        finally:
            draft.unlink()


def _remove(patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for name in glob.glob(pattern, include_hidden=True):  # noqa: PTH207 (absolute)
            path = Path(name)
            if name.endswith("/"):
                with contextlib.suppress(OSError):
                    os.rmdir(name)  # noqa: PTH106 (of a link it is an error only with the slash)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def whole_path(path: Path | str) -> Path:
    """Return where a run directory is that may be given by ``~``.

    Raises `SettingsError` if there is no such home directory.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise SettingsError(
            f"run_dir={path}: there is no such home directory; write the path without ~"
        ) from error


def usual_place() -> Path:
    """Return where run directories are made: ``XDG_RUNTIME_DIR``, or ``/tmp`` if not set."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if not (base and Path(base).is_dir() and os.access(base, os.W_OK)):
        base = "/tmp"
    return Path(base)


def _check_place(place: Path) -> None:
    longest = _longest_path(place / f"{_PREFIX}01234567")
    if longest > MAX_SOCKET_PATH_BYTES:
        raise SettingsError(
            f"XDG_RUNTIME_DIR={place}: sockets there would have paths of {longest} bytes, the "
            f"system allows {MAX_SOCKET_PATH_BYTES}; set a shorter one, or give --run-dir"
        )


def _longest_path(directory: Path) -> int:
    return max(len(os.fsencode(directory / name)) for name in _LONGEST_NAMES)


def _check_length(directory: Path) -> None:
    longest = _longest_path(directory)
    if longest > MAX_SOCKET_PATH_BYTES:
        raise SettingsError(
            f"run_dir={directory}: its sockets would have paths of {longest} bytes, the system "
            f"allows {MAX_SOCKET_PATH_BYTES}; give a shorter --run-dir"
        )


def _check_private(path: Path, *, is_directory: bool) -> None:
    try:
        status = path.lstat()
    except OSError as error:
        raise SettingsError(
            f"{path}: {error.strerror}; start `tandemkv cache-rank` with this --run-dir first"
        ) from error
    is_kind = stat.S_ISDIR if is_directory else stat.S_ISREG
    if not is_kind(status.st_mode):
        kind = "directory" if is_directory else "file"
        raise SettingsError(f"{path}: must be a {kind} (and no symbolic link)")
    if is_directory and status.st_mode & stat.S_ISVTX:
        raise SettingsError(
            f"{path}: is a directory that users share (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"give one of your own, e.g. --run-dir {path}/tandemkv"
        )
    if status.st_uid != os.geteuid():
        raise SettingsError(
            f"{path}: belongs to uid {status.st_uid}, must belong to uid {os.geteuid()}; "
            "run both ranks as one user, or give another --run-dir"
        )
    if status.st_mode & 0o077:
        advice = f"chmod {'0700' if is_directory else '0600'} it, or give another --run-dir"
        if is_directory and not (path / "token").exists() and any(path.iterdir()):
            advice = f"give a directory that is for this alone, e.g. --run-dir {path}/tandemkv"
        raise SettingsError(
            f"{path}: mode {stat.S_IMODE(status.st_mode):04o} lets others in; {advice}"
        )
