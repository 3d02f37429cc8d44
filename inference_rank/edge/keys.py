# SPDX-License-Identifier: Apache-2.0
"""Keys: read from private files, compared in constant time, shown nowhere."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from enum import IntEnum
from pathlib import Path

from tandemkv.cache_rank.protocol.errors import SettingsError

from .refusal import RequestRefusedError
from .settings import EdgeSettings

LEAST_KEY_CHARACTERS = 16
_MOST_KEY_BYTES = 4096
_KEY = re.compile(r"[!-~]+")


class Role(IntEnum):
    """What a caller may do; a greater role may do all that a smaller one may."""

    ANYONE = 0
    USER = 1
    ADMIN = 2


def read_key(path: Path, setting: str) -> str:
    """Return the key in a file that nobody else can read.

    `path` has one line: the key, at least 16 printable characters without blanks. Errors name
    `setting`, the flag that named the file, and never show what is in it. Raises `SettingsError` if
    the file cannot be read, is open to group or others, or holds no usable key.
    """
    try:
        # Opened first and then judged: what is judged is what is read, and a FIFO blocks nobody.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SettingsError(
            f"{setting}={path}: cannot be read ({error.strerror}); give a regular file of mode "
            "0600 with the key in one line"
        ) from error
    try:
        _check_private(os.fstat(handle), path, setting)
    except SettingsError:
        os.close(handle)
        raise
    with os.fdopen(handle, "rb") as file:
        text = file.read(_MOST_KEY_BYTES + 1).decode("ascii", errors="replace").strip()
    if len(text) < LEAST_KEY_CHARACTERS or len(text) >= _MOST_KEY_BYTES or not _KEY.fullmatch(text):
        raise SettingsError(
            f"{setting}={path}: holds no usable key; one line of at least {LEAST_KEY_CHARACTERS} "
            "printable ASCII characters without blanks is required: `openssl rand -hex 32` makes "
            "one"
        )
    return text


def _check_private(status: os.stat_result, path: Path, setting: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SettingsError(f"{setting}={path}: must be a regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise SettingsError(
            f"{setting}={path}: belongs to uid {status.st_uid}, must belong to uid "
            f"{os.geteuid()} or to root; chown it"
        )
    if status.st_mode & 0o077:
        raise SettingsError(
            f"{setting}={path}: mode {stat.S_IMODE(status.st_mode):04o} lets others read or change "
            f"it, 0600 is required; chmod 0600 {path}"
        )


class Keys:
    """Who a caller is, by the bearer token that came.

    Digests are kept, not keys, so that comparing takes equal time whatever the token's length and
    a dump of this object shows nothing.
    """

    def __init__(self, *, api: str | None = None, admin: str | None = None) -> None:
        self._api = _digest(api) if api is not None else None
        self._admin = _digest(admin) if admin is not None else None
        self._internal: bytes | None = None

    @classmethod
    def read(cls, settings: EdgeSettings) -> Keys:
        """Read the files that the settings name.

        Raises `SettingsError` if one cannot be used, or both hold the same key.
        """
        files = {"api": settings.api_key_file, "admin": settings.admin_key_file}
        found = {
            name: None if path is None else read_key(path, f"--{name}-key-file")
            for name, path in files.items()
        }
        if found["api"] is not None and found["api"] == found["admin"]:
            raise SettingsError(
                "--api-key-file and --admin-key-file hold the same key, and every user would be an "
                "administrator; use two keys"
            )
        return cls(**found)

    def allow_internal(self, key: str) -> None:
        """Accept one more key for users: that of SGLang's own first request."""
        self._internal = _digest(key)

    def role_of(self, authorization: bytes | None) -> Role:
        """Return what the sender of an ``Authorization`` header may do."""
        scheme, _, token = (authorization or b"").partition(b" ")
        is_bearer = scheme.lower() == b"bearer"
        digest = hashlib.sha256(token.strip() if is_bearer else b"").digest()
        # All are compared, always: which one matched cannot be told from the time.
        is_admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        is_user = self._api is not None and hmac.compare_digest(digest, self._api)
        is_internal = self._internal is not None and hmac.compare_digest(digest, self._internal)
        if is_admin and is_bearer:
            return Role.ADMIN
        if self._api is None or ((is_user or is_internal) and is_bearer):
            return Role.USER
        return Role.ANYONE

    def require(self, needed: Role, authorization: bytes | None) -> Role:
        """Return the caller's role.

        Raises `RequestRefusedError`: 401 without a valid key, 403 where only an administrator may.
        """
        role = self.role_of(authorization)
        if role >= needed:
            return role
        if needed is Role.ADMIN and (role is Role.USER or self._admin is None):
            message = "this route needs the admin key"
            if self._admin is None:
                message += ", and the server has none: start it with --admin-key-file"
            raise RequestRefusedError(403, message, code="admin_key_required")
        raise RequestRefusedError(
            401,
            "no valid key: send the header `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("ascii")).digest()
