"""Requests to object stores by fsspec, each with a deadline, and tried again where the store itself is at fault.

Blocks: call it from a thread. A driver that hangs holds up one thread of its own, and nobody beyond the deadline. What
a driver says is told without the values that came from the environment.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from eval_service.contract.errors import ConfigError, EvalfleetError, InvalidRequest, SnapshotMissing, StoreUnavailable
from eval_service.objects.config import ObjectsConfig
from eval_service.objects.urls import protocol_of

CALL_S = 60.0  # for one request that moves no more than a chunk
CHUNK_BYTES = 16 << 20
_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0
_TOLD_CHARS = 300
_DEFAULTS: Mapping[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30}, "use_listings_cache": False},
    "file": {"auto_mkdir": True},
}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Until:
    """A deadline, on a clock of seconds."""

    at: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float) -> Until:
        """So many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds left; not below 0."""
        return max(0.0, self.at - self.clock())


class Denied(SnapshotMissing):
    """It is there or not: these credentials may not tell."""


class ObjectStore:
    """Reads and writes objects by their whole URL."""

    def __init__(
        self,
        config: ObjectsConfig,
        *,
        environ: Mapping[str, str] = os.environ,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config
        self._environ = environ
        self.sleep = sleep

    def check(self) -> None:
        """See that each protocol has a driver and its secrets; asks nothing of any store.

        Raises:
            ConfigError: one that has not.
        """
        for protocol in self.config.protocols:
            self._files(protocol)

    def size(self, url: str, until: Until) -> int | None:
        """An object's size in bytes; None: it is not there."""
        try:
            info = self._ask(url, lambda files, path: files.info(path), until)
        except Denied:
            raise
        except SnapshotMissing:
            return None
        return int(info.get("size") or 0) if info.get("type") != "directory" else None

    def read(self, url: str, until: Until, *, most_bytes: int) -> bytes:
        """A small object.

        Raises:
            SnapshotMissing: it is not there, or may not be read.
            StoreUnavailable: the store can't be reached, or it is larger.
        """
        size = self.size(url, until)
        if size is None:
            raise SnapshotMissing(f"{url} is not in the store", field="snapshot")
        if size > most_bytes:
            raise StoreUnavailable(f"{url} has {size} bytes, more than {most_bytes}", field="snapshot")
        return b"".join(self.chunks(url, size, until))

    def chunks(self, url: str, size_bytes: int, until: Until) -> Iterator[bytes]:
        """An object's bytes in order; shorter where it has come to be shorter."""
        for start in range(0, size_bytes, CHUNK_BYTES):
            end = min(size_bytes, start + CHUNK_BYTES)

            def part(files: Any, path: str, start: int = start, end: int = end) -> bytes:
                return bytes(files.cat_file(path, start=start, end=end))

            yield self._ask(url, part, until)

    def put(self, url: str, data: bytes, until: Until) -> None:
        """Write a small object."""
        self._ask(url, lambda files, path: files.pipe_file(path, data), until, refused=InvalidRequest)

    def put_file(self, url: str, source: Path, until: Until) -> None:
        """Write an object of a file's bytes."""

        def send(files: Any, path: str) -> None:
            files.put_file(str(source), path)

        self._ask(url, send, until, call_s=until.left_s, refused=InvalidRequest)

    def delete(self, url: str, until: Until) -> None:
        """Delete an object; one that is not there is a success."""
        if self.size(url, until) is not None:
            self._ask(url, lambda files, path: files.rm_file(path), until)

    def _ask(
        self,
        url: str,
        request: Callable[[Any, str], _T],
        until: Until,
        *,
        call_s: float = CALL_S,
        refused: type[EvalfleetError] = SnapshotMissing,
    ) -> _T:
        protocol = protocol_of(url)
        files = self._files(protocol)
        path = files._strip_protocol(url)
        backoff_s = _BACKOFF_S
        for attempt in range(1, self.config.attempts + 1):
            try:
                return _bounded(lambda: request(files, path), min(call_s, until.left_s))
            except PermissionError as exc:
                raise Denied(f"{url}: {self._told(protocol, exc)}", field="snapshot") from exc
            except FileNotFoundError as exc:
                raise refused(f"{url}: {self._told(protocol, exc)}", field="snapshot") from exc
            except Exception as exc:
                if attempt == self.config.attempts or until.left_s <= backoff_s:
                    told = f"{url} can't be had, after {attempt} tries: {self._told(protocol, exc)}"
                    raise StoreUnavailable(told, field="snapshot") from exc
            self.sleep(backoff_s)
            backoff_s = min(_MAX_BACKOFF_S, backoff_s * 2)
        raise AssertionError("attempts is at least 1")

    def _files(self, protocol: str) -> Any:
        """The driver; fsspec keeps one for the same options."""
        try:
            import fsspec
        except ImportError as exc:
            raise ConfigError(
                "fsspec is not installed", field="objects", hint="pip install 'evalfleet[objects]'"
            ) from exc
        secrets = self.config.secrets(protocol, self._environ)
        options = {**_DEFAULTS.get(protocol, {}), **self.config.options.get(protocol, {}), **secrets}
        try:
            return fsspec.filesystem(protocol, **options)
        except (ImportError, ValueError) as exc:
            hint = "pip install 'evalfleet[objects]', or fsspec's driver for it"
            raise ConfigError(f"{protocol}:// has no driver: {exc}", field="objects.prefixes", hint=hint) from exc

    def _told(self, protocol: str, exc: Exception) -> str:
        told = f"{type(exc).__name__}: {exc}"
        for secret in self.config.secrets(protocol, self._environ).values():
            told = told.replace(secret, "***")
        return told[:_TOLD_CHARS]


def _bounded(work: Callable[[], _T], timeout_s: float) -> _T:
    """What some work returns or raises, if it does so in time."""
    box: queue.SimpleQueue[Callable[[], _T]] = queue.SimpleQueue()

    def run() -> None:
        try:
            value = work()
        except Exception as exc:  # noqa: BLE001 - a thread's edge: it is raised where it is waited for
            box.put(_raiser(exc))
        else:
            box.put(lambda: value)

    threading.Thread(target=run, name="object store", daemon=True).start()
    try:
        outcome = box.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s") from None
    return outcome()


def _raiser(exc: Exception) -> Callable[[], Any]:
    def raises() -> Any:
        raise exc

    return raises
