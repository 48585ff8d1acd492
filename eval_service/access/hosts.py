"""Addresses: which are this host's own, and which the service must never be made to call."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolve = Callable[[str, int], Sequence[str]]

# Addresses of IPv4 behind a translator (RFC 6052), in the last 32 bits.
_TRANSLATED = IPv6Network("64:ff9b::/96")
# Where clouds tell an instance its own credentials, apart from link-local ones.
_METADATA = frozenset(map(ip_address, ("169.254.169.254", "100.100.100.200", "fd00:ec2::254", "168.63.129.16")))


def is_loopback(host: str) -> bool:
    """Whether only this host reaches what listens there; a name other than localhost counts as beyond."""
    if host.lower() in ("localhost", "localhost."):
        return True
    address = as_address(host)
    return address is not None and address.is_loopback


def as_address(host: str) -> Address | None:
    """A literal address, without brackets or zone; one of IPv4 inside IPv6 is the inner one."""
    try:
        found = ip_address(host.strip("[]").split("%")[0])
    except ValueError:
        return None
    if not isinstance(found, IPv6Address):
        return found
    if found in _TRANSLATED:
        return IPv4Address(int(found) & 0xFFFFFFFF)
    return found.ipv4_mapped or found.sixtofour or found


def never_called(address: Address) -> bool:
    """Link-local, a cloud's metadata, multicast, or no address at all: nobody's hook or engine is there."""
    return address in _METADATA or address.is_link_local or address.is_multicast or address.is_unspecified


def resolve(host: str, port: int) -> Sequence[str]:
    """All addresses of a name.

    Raises:
        OSError: it has none.
    """
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def checked_address(host: str, port: int, networks: Iterable[str] = (), *, resolver: Resolve = resolve) -> str:
    """The address to call for a host that is on the list of those that may be called.

    An address is what it says. A name must lead to public addresses, or into the networks that were allowed beside it:
    whoever answers for the name in the DNS could otherwise lead a request to any service inside. The caller connects to
    what is returned here, so that a second answer of the DNS counts for nothing.

    Raises:
        PermissionError: an address that must not be called; names it.
        OSError: the name has no address.
    """
    literal = as_address(host)
    if literal is not None:
        if never_called(literal):
            raise PermissionError(f"{host} must not be called: link-local or metadata address")
        return str(literal)
    allowed = [ip_network(network) for network in networks]
    found = list(resolver(host, port))
    for text in found:
        address = as_address(text)
        if address is None or never_called(address):
            raise PermissionError(f"{host} leads to {text}, which must not be called")
        if not address.is_global and not any(address in network for network in allowed):
            raise PermissionError(f"{host} leads to {text}, which is private; allow its network in webhook_networks")
    if not found:
        raise OSError(f"{host} has no address")
    return found[0]
