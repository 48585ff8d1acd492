"""The numbers that bound the router."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What is allowed at once, and for how long. Times are seconds.

    A target's gate lets `server_concurrency` requests in for each of its healthy upstreams.
    """

    server_concurrency: int = 32
    """Requests in flight per upstream."""
    connect_timeout_s: float = 5.0
    """For one connection to come about."""
    request_timeout_s: float = 300.0
    """For one run on one upstream; past it, the upstream is at fault and the request runs again elsewhere."""
    max_waiting: int = 10_000
    """Requests that wait at a target's gate; one more is refused."""
    wait_timeout_s: float = 600.0
    """For one wait at the gate, whether no upstream has room or none is there."""
    max_faults: int = 3
    """Runs of one request that may reach an upstream and meet a fault; after so many the caller gets the error. Where
    no connection came about the request can't be to blame: ejection and the caller's deadline bound that."""
    eject_after: int = 3
    """Faults in a row that eject an upstream until it is readmitted."""
    same_again_after_s: float = 1.0
    """A replay that finds no other upstream for so long may have the one that failed it, if it is still healthy."""

    def __post_init__(self) -> None:
        for name in ("server_concurrency", "max_faults", "eject_after"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} would let nothing through; use 1 or more")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting: {self.max_waiting} is negative; 0 refuses whatever can't start at once")
        for name in ("connect_timeout_s", "request_timeout_s", "wait_timeout_s", "same_again_after_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: {getattr(self, name)} is no deadline; use seconds above 0")
