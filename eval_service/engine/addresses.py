"""Where on its node a replica's engine listens, which is also what others are told.

Invariant: on a cluster of several machines nobody is told a loopback address of another node.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence

from eval_service.contract.errors import ConfigError

LOOPBACK = "127.0.0.1"
KEY = "service.engine_host"
Interfaces = Mapping[str, Sequence[str]]


def interfaces() -> Interfaces:
    """This node's addresses (IPv4), by interface."""
    import psutil

    return {
        name: [address.address for address in found if address.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
    }


def is_loopback(host: str) -> bool:
    """Whether nobody but this node reaches it; a name other than localhost is taken at its word."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def engine_address(
    wanted: str | None, node: str, *, joined: bool, interfaces: Callable[[], Interfaces] = interfaces
) -> str:
    """The address that an engine binds, and that its URL names.

    Args:
        wanted: `service.engine_host`: an interface, a network or an address.
        node: as Ray knows this node.
        joined: whether the cluster is somebody's, and may have more nodes than this one.

    Raises:
        ConfigError: this node has no such address, or others could not reach it.
    """
    if wanted is None:
        return node if joined else LOOPBACK
    found = _found(wanted, interfaces())
    if found is None:
        raise ConfigError(
            f"{node} has no IPv4 address on {wanted}",
            field=KEY,
            hint="name an interface (ib0) or a network (10.1.0.0/16) that every node with engines is on",
        )
    if joined and is_loopback(found) and not is_loopback(node):
        raise ConfigError(
            f"{found} is reached from its own node alone", field=KEY, hint="leave it out for each node's own address"
        )
    return found


def _found(wanted: str, interfaces: Interfaces) -> str | None:
    if wanted in interfaces:
        return next(iter(interfaces[wanted]), None)
    try:
        network = ipaddress.ip_network(wanted)
    except ValueError:
        return None
    every = (address for found in interfaces.values() for address in found)
    return next((address for address in every if ipaddress.ip_address(address) in network), None)
