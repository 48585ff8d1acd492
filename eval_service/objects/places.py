"""Where a snapshot is to be read on this node: its own directory, or the node's cache of the store that it is in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from eval_service.contract.errors import ConfigError
from eval_service.objects.cache import Lease, NodeCache
from eval_service.objects.config import ObjectsConfig
from eval_service.objects.store import ObjectStore, Until
from eval_service.objects.urls import is_url


class Places:
    """Of one process.

    Args:
        config: None: there are no object stores, and a URL is refused.
        state_dir: where the cache lies unless the config names another place.
    """

    def __init__(self, config: ObjectsConfig | None = None, state_dir: Path | None = None) -> None:
        self._config = config
        self._cache: NodeCache | None = None
        if config is not None:
            directory = config.cache_dir or (state_dir or Path.cwd()) / "objects"
            store = ObjectStore(config)
            self._cache = NodeCache(directory, config.cache_bytes, store, parallel=config.parallel)

    @property
    def caches(self) -> bool:
        """Whether there are object stores."""
        return self._cache is not None

    @property
    def cache(self) -> NodeCache:
        """The node's.

        Raises:
            ConfigError: the service has no object stores.
        """
        if self._cache is None:
            raise ConfigError("the service has no object stores", field="objects", hint="add [objects] to fleet.toml")
        return self._cache

    @property
    def fetch_timeout_s(self) -> float:
        """For one snapshot to be on a node; 0 without object stores."""
        return self._config.fetch_timeout_s if self._config is not None else 0.0

    def hold(self, url: str, digest: str | None) -> Lease:
        """A snapshot in the node's cache; blocks. Raises as `NodeCache.hold`, and ConfigError without object stores."""
        return self.cache.hold(url, digest, Until.after(self.fetch_timeout_s))

    @asynccontextmanager
    async def near(self, snapshot: str, digest: str | None) -> AsyncIterator[Path]:
        """The directory to read a snapshot in, which stays there meanwhile.

        Raises:
            As `hold`, where it is named by URL.
        """
        if not is_url(snapshot):
            yield Path(snapshot)
            return
        lease = await self._held(snapshot, digest)
        try:
            yield lease.path
        finally:
            lease.release()

    def there(self, snapshot: str, digest: str) -> bool:
        """Whether a snapshot could be loaded again; blocks."""
        if not is_url(snapshot):
            return Path(snapshot).is_dir()
        return self._cache is not None and self._cache.has(snapshot, digest)

    async def _held(self, url: str, digest: str | None) -> Lease:
        """`hold`, in a thread that keeps nobody from ending; a lease that nobody waits for any longer is let go of."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Lease] = loop.create_future()

        def settle(lease: Lease | None, error: Exception | None) -> None:
            if future.done():
                if lease is not None:
                    lease.release()
            elif lease is not None:
                future.set_result(lease)
            elif error is not None:
                future.set_exception(error)

        def work() -> None:
            lease, error = None, None
            try:
                lease = self.hold(url, digest)
            except Exception as exc:  # noqa: BLE001 - a thread's edge: it is raised where it is waited for
                error = exc
            try:
                loop.call_soon_threadsafe(settle, lease, error)
            except RuntimeError:  # the loop is closed
                if lease is not None:
                    lease.release()

        threading.Thread(target=work, name="objects", daemon=True).start()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:  # it came at the same moment
                future.result().release()
            raise
