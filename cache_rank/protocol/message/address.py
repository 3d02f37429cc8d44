# SPDX-License-Identifier: Apache-2.0
"""Addresses of a cache rank on another host."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass, replace
from typing import Any, Self

from tandemkv.cache_rank.protocol.errors import CacheRankLostError, SettingsError

_SCHEME = "tcp://"
_LISTENS_S = 2.0
"""How long one of several addresses of a name is given to take a connection."""
_MAPPED_WILDCARD = ipaddress.ip_address("::ffff:0.0.0.0")
"""The wildcard of IPv4 as an IPv6 socket takes it."""
_LABEL = "[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"(?=.*[A-Za-z]){_LABEL}(\.{_LABEL})*\.?")


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """A host and a port; port 0 is any free one.

    The host is the IP address of an interface or, of the other end, a name that leads to one.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``tcp://HOST:PORT`` of our own end.

        Raises `SettingsError` if it is anything else, or HOST is not one address: names may change
        their meaning, and a wildcard would listen on every interface.
        """
        host, port = _parts(text)
        return cls(checked_interface(host), port)

    @classmethod
    def parse_peer(cls, text: str) -> Self:
        """Read ``tcp://HOST:PORT`` of the other end, where HOST may be a name as well.

        Who answers there has to have the key that we know, whatever the name leads to. Raises
        `SettingsError` if it is neither.
        """
        host, port = _parts(text)
        return cls(host if _NAME.fullmatch(host) else checked_interface(host), port)

    @classmethod
    def parse_node(cls, text: str) -> Self:
        """Read ``HOST:PORT`` where SGLang's processes of several hosts meet; HOST may be a name.

        Raises `SettingsError` if it is neither.
        """
        try:
            return cls.parse_peer(f"{_SCHEME}{text}")
        except SettingsError as error:
            raise SettingsError(
                f"dist_init_addr={text!r} must be HOST:PORT, with a name or the address of one "
                "interface of host 0"
            ) from error

    @property
    def as_node(self) -> str:
        """``HOST:PORT``, which `parse_node` reads."""
        return str(self).removeprefix(_SCHEME)

    def resolved(self) -> Self:
        """Return the address that the name leads to now.

        Of several, as with IPv4 and IPv6, it is the first at which somebody listens, else the
        first. Raises `CacheRankLostError` if it leads to none.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise CacheRankLostError(
                f"{self}: the name leads to no address ({error.strerror})"
            ) from error
        places = list(dict.fromkeys((each[0], each[4]) for each in found))
        if len(places) > 1:
            places.sort(key=lambda place: not _listens(*place))
        return replace(self, host=str(places[0][1][0]))

    def own_host(self) -> str:
        """Return the address of this host from which this one is reached; sends nothing.

        Raises `CacheRankLostError` if no way leads there.
        """
        family = socket.AF_INET6 if self.is_ipv6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((self.host, self.port))
            except OSError as error:
                raise CacheRankLostError(f"{self} cannot be reached: {error.strerror}") from error
            return str(probe.getsockname()[0])

    @property
    def is_ipv6(self) -> bool:
        """Whether the interface has an IPv6 address."""
        return ":" in self.host

    def __str__(self) -> str:
        return f"{_SCHEME}[{self.host}]:{self.port}" if self.is_ipv6 else (
            f"{_SCHEME}{self.host}:{self.port}"
        )  # fmt: skip


def _listens(family: int, place: tuple[Any, ...]) -> bool:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_LISTENS_S)
        return probe.connect_ex(place) == 0
    return False  # this host does not know the family


def _parts(text: str) -> tuple[str, int]:
    host, _, port = text.removeprefix(_SCHEME).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not text.startswith(_SCHEME) or not port.isdecimal() or int(port) > 0xFFFF:
        raise SettingsError(f"address={text!r} must be tcp://HOST:PORT")
    return host, int(port)


def checked_interface(host: str) -> str:
    """Return `host` if it is the IP address of one interface; raises `SettingsError` if not."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError as error:
        raise SettingsError(f"host={host!r} must be the IP address of an interface") from error
    if found.is_unspecified or found == _MAPPED_WILDCARD:
        raise SettingsError(
            f"host={host} is every interface of the machine; name the one that leads to the other "
            "host"
        )
    return host
