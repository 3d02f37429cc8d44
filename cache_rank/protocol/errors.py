# SPDX-License-Identifier: Apache-2.0
"""Errors that cross the boundary between the ranks. Every one says what to do."""

from __future__ import annotations


class TandemKVError(Exception):
    """Base of every error that tandemkv raises on purpose."""


class SettingsError(TandemKVError):
    """A setting is unknown, out of range, or contradicts another one."""


class UnsupportedModelError(TandemKVError):
    """The model's attention is not one that the resident set can serve."""


class ContractError(TandemKVError):
    """The installed SGLang is not the one that this plugin was written for."""


class CacheRankError(TandemKVError):
    """Base of the errors about the other process."""


class HandshakeRefusedError(CacheRankError):
    """The cache rank refused the handshake; `field` names what differs, and `reason` says how."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"handshake refused, field={field}: {message}")
        self.field, self.reason = field, message


class AlreadyServedError(CacheRankError):
    """Another live process serves what was to be served."""


class CacheRankLostError(CacheRankError):
    """The cache rank died, or hung."""


class ProtocolError(CacheRankError):
    """A frame was malformed, out of bounds, or out of order."""


class UnusableBooksError(ProtocolError):
    """What an engine of an earlier epoch left is nothing that this engine can use."""
