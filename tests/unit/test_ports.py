"""Ports that are chosen now and taken later."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator

import pytest

from eval_service import ports

HOST = "127.0.0.1"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The only one that there is to give; no kernel gives it to another test."""
    monkeypatch.setattr(ports, "_claims", deque())
    monkeypatch.setattr(ports, "_PORTS", range(31_000, 32_000))  # no service of another test is told one of these
    port = ports.free_port(HOST)
    forget()
    monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))
    monkeypatch.setattr(ports, "_TRIES", 1)
    yield port
    forget()


def forget() -> None:
    """As if whoever was given a port had ended."""
    while ports._claims:
        os.close(ports._claims.pop())


def test_a_port_that_somebody_has_is_not_given_and_there_is_always_one(port: int) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, port))
        taken.listen()
        assert ports.free_port(HOST) != port
        assert len({port, *ports.free_ports(HOST, 3)}) == 4
    assert ports.free_port(HOST) == port
    with pytest.raises(OSError, match="assign"):
        ports.free_port("203.0.113.9")  # no machine's


@pytest.mark.skipif(sys.platform != "linux", reason="there are no abstract names")
def test_a_port_that_was_given_is_nobody_elses_while_a_server_starts_on_it(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two services, or a service and its engine, may be told theirs long before they listen."""
    assert ports.free_port(HOST) == port
    assert ports.free_port(HOST) != port
    asked = f"from eval_service import ports; ports._PORTS = range({port}, {port + 1}); ports._TRIES = 1; "
    command = [sys.executable, "-c", asked + f"print(ports.free_port({HOST!r}))"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert int(told) != port
    for number in range(ports._CLAIMS):
        ports._claim(-(100 * os.getpid() + number))  # no port's name, and nobody else's
    assert len(ports._claims) == ports._CLAIMS, "one process keeps few"
    assert ports.free_port(HOST) == port
