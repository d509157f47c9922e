"""Which hosts and addresses media may be fetched from: names, and of addresses only those of the public internet."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
_SPECIAL: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = (
    ipaddress.IPv4Network("192.0.0.0/24"),  # of protocols, RFC 6890; clouds answer there too
    ipaddress.IPv4Network("192.88.99.0/24"),  # relays of 6to4, RFC 7526
    ipaddress.IPv4Network("168.63.129.16/32"),  # Azure's own service, seen from each of its machines
    ipaddress.IPv6Network("3fff::/20"),  # examples, RFC 9637
)
"""Not of the public internet, whatever the release of Python says: 3.11.7 knows only parts of them."""
_COMPATIBLE = ipaddress.IPv6Network("::/96")


def literal(host: str) -> Address | None:
    """The address that a host is; None for a name.

    Raises ValueError for an address in another notation than the usual one (2130706433, 0x7f.1, 0177.0.0.1, 127.1):
    what it means depends on who reads it.
    """
    if ":" in host or "%" in host:
        return ipaddress.IPv6Address(host)
    last = host.rstrip(".").rpartition(".")[2]
    if _NUMBER.fullmatch(last):  # no name of the internet ends so: it can only be meant as an address
        return ipaddress.IPv4Address(host)
    return None


def is_public(address: Address) -> bool:
    """Whether it is one host of the public internet, and so is every address that it carries inside."""
    return all(map(_is_public, (address, *_carried(address))))


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and (address.scope_id is not None or address.is_site_local):
        return False
    if any(address in network for network in _SPECIAL):
        return False
    return address.is_global and not (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    )


def _carried(address: Address) -> Iterator[ipaddress.IPv4Address]:
    """Addresses of version 4 inside one of version 6: mapped, compatible, 6to4, Teredo, NAT64."""
    if isinstance(address, ipaddress.IPv4Address):
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    if address in _COMPATIBLE or any(address in network for network in _NAT64):
        yield ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)


class Hosts:
    """The hosts that an operator allows: names, `.example.org` for all below it, addresses; or any."""

    def __init__(self, names: tuple[str, ...] | None) -> None:
        self._any = names is None
        self._names = frozenset(name.lower().rstrip(".") for name in names or ())

    def allow(self, host: str) -> bool:
        """Whether media may come from a host."""
        if self._any:
            return True
        host = host.lower().rstrip(".")
        labels = host.split(".")
        above = ("." + ".".join(labels[i:]) for i in range(1, len(labels)))
        return host in self._names or any(name in self._names for name in above)
