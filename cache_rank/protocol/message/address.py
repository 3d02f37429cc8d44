# SPDX-License-Identifier: Apache-2.0
"""Addresses of a cache rank on another host."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Self

from tandemkv.cache_rank.protocol.errors import SettingsError

_SCHEME = "tcp://"


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """An interface, named by its IP address, and a port; port 0 is any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``tcp://HOST:PORT``.

        Raises
        ------
        SettingsError
            If it is anything else, or HOST is not one address: names may change their meaning, and
            a wildcard would listen on every interface.
        """
        host, _, port = text.removeprefix(_SCHEME).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not text.startswith(_SCHEME) or not port.isdecimal() or int(port) > 0xFFFF:
            raise SettingsError(f"address={text!r} must be tcp://HOST:PORT")
        return cls(checked_interface(host), int(port))

    @property
    def is_ipv6(self) -> bool:
        """Whether the interface has an IPv6 address."""
        return ":" in self.host

    def __str__(self) -> str:
        return f"{_SCHEME}[{self.host}]:{self.port}" if self.is_ipv6 else (
            f"{_SCHEME}{self.host}:{self.port}"
        )  # fmt: skip


def checked_interface(host: str) -> str:
    """Return `host` if it is the IP address of one interface; raises `SettingsError` if not."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError as error:
        raise SettingsError(f"host={host!r} must be the IP address of an interface") from error
    if found.is_unspecified:
        raise SettingsError(
            f"host={host} is every interface of the machine; name the one that leads to the other "
            "host"
        )
    return host
