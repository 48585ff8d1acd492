"""The numbers that bound what clients may do to the proxy."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """Times are seconds, sizes bytes."""

    max_connections: int = 4096
    """Clients connected at once; one more gets 503."""
    max_head_bytes: int = 32 << 10
    """A request's line and headers; more is 431."""
    max_body_bytes: int = 16 << 20
    """A request's body, which is held until the answer's first byte, so that the request can run again; more is 413."""
    max_buffered_bytes: int = 1 << 30
    """All requests' bodies together; more is 503."""
    hold_bytes: int = 1 << 20
    """An answer whose length is told and is no more than this is held until it is whole, so that one that breaks off
    can run again; a longer one, and any that is streamed, is passed on as it comes."""
    head_timeout_s: float = 10.0
    """From a request's first byte to the end of its headers; then 408."""
    body_timeout_s: float = 120.0
    """From there to the end of its body; then 408."""
    idle_timeout_s: float = 75.0
    """Between requests; then the connection is closed."""
    write_timeout_s: float = 60.0
    """For a client to take what is buffered for it; then its connection is cut, and its request cancelled upstream."""
    request_timeout_s: float = 900.0
    """For one request in all, waits and replays included; then 504."""
    linger_s: float = 2.0
    """After a refusal, for the client to read it before the connection is cut."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{field.name}: {value} is no bound; use a number above 0")
