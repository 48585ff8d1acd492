"""Every error that aiohttp can raise for a request has its kind."""

from __future__ import annotations

import inspect

import aiohttp
import pytest
from aiohttp import client_exceptions

from router.faults import TRANSPORT_ERRORS, FaultKind, fault_of

_ALL = [
    cls
    for _, cls in inspect.getmembers(client_exceptions, inspect.isclass)
    if issubclass(cls, aiohttp.ClientError) and cls.__module__ == client_exceptions.__name__
]


@pytest.mark.parametrize("cls", _ALL, ids=lambda cls: cls.__name__)
def test_every_client_error_of_aiohttp_is_mapped(cls: type[Exception]) -> None:
    error = _without_arguments(cls)
    assert isinstance(error, TRANSPORT_ERRORS)
    assert fault_of("a", error).kind in FaultKind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (aiohttp.ConnectionTimeoutError(), FaultKind.CONNECT),
        (aiohttp.SocketTimeoutError(), FaultKind.TIMEOUT),
        (TimeoutError(), FaultKind.TIMEOUT),
        (aiohttp.ServerDisconnectedError(), FaultKind.DISCONNECTED),
        (aiohttp.ClientPayloadError("half"), FaultKind.BODY),
        (ConnectionResetError("reset"), FaultKind.DISCONNECTED),
    ],
)
def test_kinds(error: Exception, kind: FaultKind) -> None:
    fault = fault_of("a", error)
    assert (fault.upstream, fault.kind) == ("a", kind)
    assert type(error).__name__ in str(fault)


def _without_arguments(cls: type[Exception]) -> Exception:
    bare = type(cls.__name__, (cls,), {"__init__": lambda _: None, "__str__": lambda _: "told"})
    error: Exception = bare()
    return error
