"""Ports that are chosen now and taken later."""

from __future__ import annotations

import socket

import pytest

from eval_service import ports


def test_a_port_that_somebody_has_is_not_given_and_there_is_always_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))
        monkeypatch.setattr(ports, "_TRIES", 1)
        assert ports.free_port("127.0.0.1") != port
        assert len({port, *ports.free_ports("127.0.0.1", 3)}) == 4
    assert ports.free_port("127.0.0.1") == port
    with pytest.raises(OSError, match="assign"):
        ports.free_port("203.0.113.9")  # no machine's
