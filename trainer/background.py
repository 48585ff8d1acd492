"""The exporter's thread: jobs in order, and the buffer that each holds until it has ended.

Invariant: whoever has the buffer submits a job or releases it; a job that ends, however, gives it back, and the next
one finds the thread at work.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)
Job = Callable[[], None]


class Background:
    """One thread, started with its first job."""

    def __init__(self) -> None:
        self._buffer = threading.Semaphore(1)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    def acquire(self, timeout_s: float) -> bool:
        """Wait for the buffer; tells whether it was had."""
        return self._buffer.acquire(timeout=max(0.0, timeout_s))

    def release(self) -> None:
        """Give the buffer back without a job."""
        self._buffer.release()

    def submit(self, job: Job) -> None:
        """Run a job behind; the caller has the buffer. What the job raises is told in the log, and nowhere else."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="evalfleet-export", daemon=True)
            thread.start()
            self._thread = thread
        self._idle.clear()
        self._jobs.put(job)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until no job is left; tells whether that came about."""
        return self._idle.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the thread, after what it is doing."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while self._ran(self._jobs.get()):  # no name of its own for a job: what it holds is let go of once it has ended
            pass

    def _ran(self, job: Job | None) -> bool:
        if job is None:
            return False
        try:
            job()
        except Exception:
            log.exception("what was to be written behind has failed")
        finally:
            # Idle first: who gets the buffer next may submit at once.
            if self._jobs.empty():
                self._idle.set()
            self._buffer.release()
        return True
