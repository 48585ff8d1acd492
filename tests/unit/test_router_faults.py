"""Every way in which a connection can end has its kind of fault."""

from __future__ import annotations

import ssl

import httptools
import pytest
from httptools.parser import errors

from router.faults import FaultKind, broken_of


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_of_the_parser_is_a_fault_of_the_protocol(name: str) -> None:
    error = getattr(httptools, name)("told")
    broken = broken_of(error)
    assert (broken.kind, name in broken.detail) == (FaultKind.PROTOCOL, True)


@pytest.mark.parametrize("error", [None, ConnectionResetError("reset"), BrokenPipeError(), ssl.SSLError("cut")])
def test_a_connection_that_ends_is_told_apart_by_how_far_the_answer_had_come(error: Exception | None) -> None:
    assert broken_of(error).kind is FaultKind.DISCONNECTED
    assert broken_of(error, in_body=True).kind is FaultKind.BODY
