# SPDX-License-Identifier: Apache-2.0
"""CURVE keys of the two ends of a link between hosts.

A folder on each host. ``<end>.key_secret`` is the secret key of the end that runs there, and never
leaves it; ``<end>.key`` the public one, which the other host needs. On the cache rank's host the
public keys in the folder are the allow-list.
"""

from __future__ import annotations

import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth

from tandemkv.cache_rank.protocol.errors import SettingsError

CACHE_RANK, INFERENCE_RANK = "cache_rank", "inference_rank"
_PUBLIC, _SECRET = ".key", ".key_secret"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Keys of one end, in Z85 text; the secret one is not shown."""

    public: bytes
    secret: bytes = field(repr=False)


def make_keys(folder: Path) -> tuple[Path, ...]:
    """Make the keys of both ends in `folder`, which is made if need be; those there are kept.

    So is a public key without its secret one, which is on the other host. A secret key whose public
    one was moved away gets that again. Returns the files that were made. Raises `SettingsError` if
    they cannot be written, or such a secret key is damaged or can be read by others.
    """
    made: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for end in (CACHE_RANK, INFERENCE_RANK):
            secret, public = _files(folder, end)
            if secret.exists() and not public.exists():
                own_keys(folder, end)
                lines = secret.read_text().splitlines(keepends=True)
                public.write_text("".join(line for line in lines if "secret-key" not in line))
                public.chmod(0o644)
                made.append(public)
            elif not public.exists():
                # Not there at once: they are written as the umask says.
                with tempfile.TemporaryDirectory(dir=folder) as private:  # of mode 0700
                    for name in zmq.auth.create_certificates(private, end):
                        own = Path(name)
                        own.chmod(0o600 if own.suffix == _SECRET else 0o644)
                        made.append(own.rename(folder / own.name))
    except OSError as error:
        raise SettingsError(f"{folder}: keys cannot be made there: {error.strerror}") from error
    return tuple(made)


def key_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of keys that are in `folder`, of both ends."""
    paths = (path for end in (CACHE_RANK, INFERENCE_RANK) for path in _files(folder, end))
    return tuple(path for path in paths if path.exists())


def _files(folder: Path, end: str) -> tuple[Path, Path]:
    return folder / f"{end}{_SECRET}", folder / f"{end}{_PUBLIC}"


def own_keys(folder: Path, end: str) -> KeyPair:
    """Return the keys of `end`, which runs on this host.

    Raises `SettingsError` if there are none, or others can read the secret one.
    """
    path = folder / f"{end}{_SECRET}"
    public, secret = _load(path)
    if secret is None:
        raise SettingsError(f"{path}: holds no secret key; make the keys anew")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(f"{path}: others can read the secret key; chmod 600 it")
    return KeyPair(public, secret)


def public_key(folder: Path, end: str) -> bytes:
    """Return the public key of `end`, which may run on another host.

    Raises `SettingsError` if there is none.
    """
    return _load(folder / f"{end}{_PUBLIC}")[0]


def allowed_keys(folder: Path) -> set[bytes]:
    """Return the public keys of who may connect; raises `SettingsError` if there is nobody."""
    paths = folder.glob(f"*{_PUBLIC}")
    found = {_load(path)[0] for path in paths if path.stem != CACHE_RANK}
    if not found:
        raise SettingsError(
            f"{folder}: no public key of an inference rank is there, so nobody may connect; copy "
            f"{INFERENCE_RANK}{_PUBLIC} into it"
        )
    return found


def _load(path: Path) -> tuple[bytes, bytes | None]:
    """Return the public key in a file, and the secret one if there is one."""
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: no CURVE key is there ({error})") from error
    try:
        zmq.curve_public(public)  # whether it is a key at all
        is_whole = secret is None or zmq.curve_public(secret) == public
    except (ValueError, zmq.ZMQError):
        is_whole = False
    if not is_whole:
        raise SettingsError(f"{path}: a key in it is damaged; copy it again, or make the keys anew")
    return public, secret
