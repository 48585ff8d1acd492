"""Ports for servers that start later: none that is given to somebody else meanwhile, by the kernel or by us.

A port is claimed by a name in Linux's abstract namespace. The name goes with the process that asked, or once that has
asked for some more; whoever listens has the port itself by then.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from collections import deque
from contextlib import suppress

# Below those that kernels hand out by themselves, above those that Ray's workers are given.
_PORTS = range(20_000, 30_000)
_TRIES = 100
_CLAIMS = 8  # of one process
_claims: deque[int] = deque()  # file descriptors


def free_port(host: str) -> int:
    """A port that nobody listens on now, and nobody else is given while they start to.

    Raises:
        OSError: the host's name or address is none of this machine's.
    """
    for port in random.sample(_PORTS, _TRIES):
        with suppress(OSError):
            found = _bound(host, port)
            _claim(found)
            return found
    return _bound(host, 0)


def free_ports(host: str, count: int) -> list[int]:
    """So many of them, each another."""
    found: list[int] = []
    while len(found) < count:
        port = free_port(host)
        if port not in found:
            found.append(port)
    return found


def _claim(port: int) -> None:
    if sys.platform != "linux":
        return
    with socket.socket(socket.AF_UNIX) as name:
        name.bind(f"\0evalfleet-port-{port}")
        _claims.append(name.detach())
    while len(_claims) > _CLAIMS:
        os.close(_claims.popleft())


def _bound(host: str, port: int) -> int:
    with socket.socket() as probe:
        probe.bind((host, port))
        return int(probe.getsockname()[1])
