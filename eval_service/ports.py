"""Ports for servers that start later: none that the kernel gives to somebody else meanwhile."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Below those that kernels hand out by themselves, above those that Ray's workers are given.
_PORTS = range(20_000, 30_000)
_TRIES = 100


def free_port(host: str) -> int:
    """A port that nobody listens on now.

    Raises:
        OSError: the host's name or address is none of this machine's.
    """
    for port in random.sample(_PORTS, _TRIES):
        with suppress(OSError):
            return _bound(host, port)
    return _bound(host, 0)


def free_ports(host: str, count: int) -> list[int]:
    """So many of them, each another."""
    found: list[int] = []
    while len(found) < count:
        port = free_port(host)
        if port not in found:
            found.append(port)
    return found


def _bound(host: str, port: int) -> int:
    with socket.socket() as probe:
        probe.bind((host, port))
        return int(probe.getsockname()[1])
