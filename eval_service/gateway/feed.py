"""The ledger's events for whoever follows them: one reader in each gateway, however many streams there are.

Invariants: a stream's events come in the ledger's order, each once, none left out; a stream that isn't read has a
bounded buffer, and is ended when it is full, which costs the others nothing. All is in the ledger: whoever comes back,
to whichever gateway, goes on after the last number that he saw.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass, field

from eval_service.contract.errors import EvalfleetError, Unavailable
from eval_service.gateway.waiting import LOOK_S, Watch
from eval_service.ledger.events import Event, EventLog

log = logging.getLogger(__name__)
MOST_STREAMS = 1000
MOST_UNREAD = 2000  # events that wait for one reader
BEAT_S = 10.0
_IDLE_S = 5.0
_RETRY_MS = 1000
_DROPPED = "not read fast enough, or the service has a fault"


@dataclass(eq=False)
class _Stream:
    """What waits for one reader."""

    run: str | None
    seen: int  # it has been told all up to here, by another gateway perhaps that is ahead of this one
    unread: list[bytes] = field(default_factory=list)
    some: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: bool = False

    def offer(self, told: Iterable[tuple[Event, bytes]]) -> None:
        """Events of other runs are not for it."""
        of_all = self.run is None
        mine = [frame for event, frame in told if event.seq > self.seen and (of_all or event.run == self.run)]
        if not mine or self.dropped:
            return
        if len(self.unread) + len(mine) > MOST_UNREAD:
            self.drop()
        else:
            self.unread += mine
            self.some.set()

    def drop(self) -> None:
        """End it; whoever reads it comes back and goes on from the last that he read."""
        self.dropped = True
        self.unread.clear()
        self.some.set()

    def restart(self, seen: int) -> None:
        """Go on after another number, which may be a lower one: that of another ledger."""
        self.seen = seen
        self.take()

    def take(self) -> bytes:
        """All that waits."""
        found = b"".join(self.unread)
        self.unread.clear()
        self.some.clear()
        return found


class Feed:
    """Reads the ledger's events while somebody follows them."""

    def __init__(self, log: EventLog, watch: Watch) -> None:
        self._log = log
        self._watch = watch
        self._streams: set[_Stream] = set()
        self._position = 0
        self._reading: asyncio.Task[None] | None = None
        self._joining = 0

    def check_room(self) -> None:
        """Refuse a stream too many.

        Raises:
            Unavailable: as many follow as may.
        """
        if len(self._streams) + self._joining >= MOST_STREAMS:
            raise Unavailable(f"{MOST_STREAMS} streams are open", hint="ask another gateway, or later")

    async def follow(self, run: str | None, after: int | None) -> AsyncGenerator[bytes]:
        """The stream's bytes, without an end unless its reader is too slow; whoever has the first misses nothing.

        Args:
            run: only what is of this run.
            after: the last number that was seen; None: only what comes from now on.

        Raises:
            Unavailable: the ledger is away.
        """
        stream = _Stream(run, after or 0)
        joined = await self._join(stream)
        try:
            yield f"retry: {_RETRY_MS}\n\n".encode()
            if after is not None:
                async for frames in self._missed(stream, after, joined):
                    yield frames
            while not stream.dropped:
                try:
                    async with asyncio.timeout(BEAT_S):
                        await stream.some.wait()
                except TimeoutError:
                    yield b": beat\n\n"
                    continue
                if not stream.dropped:
                    yield stream.take()
            yield _frame(
                "dropped",
                {"reason": "not read fast enough, or the service has a fault", "hint": "come back with Last-Event-ID"},
            )
        finally:
            self._streams.discard(stream)

    # --- how

    async def _join(self, stream: _Stream) -> int:
        """Let a stream have what comes after the number that is returned."""
        if self._reading is None:
            self._joining += 1
            try:
                _, newest = await asyncio.to_thread(self._log.ends)
            finally:
                self._joining -= 1
            if self._reading is None:
                self._position = newest
                self._reading = asyncio.get_running_loop().create_task(self._read_on())
        self._streams.add(stream)
        return self._position

    async def _missed(self, stream: _Stream, after: int, until: int) -> AsyncIterator[bytes]:
        """What is kept between two numbers; a `reset` where some of it is gone, or the number is of another ledger."""
        oldest, newest = await asyncio.to_thread(self._log.ends)
        if after > newest or after < oldest - 1:
            stream.restart(self._position)
            told = {"reason": "events after that number are gone", "oldest": oldest}
            yield _frame("reset", told, seq=self._position)
            return
        while after < until:
            page = await asyncio.to_thread(self._log.after, after)
            mine = [event for event in page if event.seq <= until]
            if not mine:
                return
            after = mine[-1].seq
            frames = b"".join(_of(event) for event in mine if stream.run is None or event.run == stream.run)
            if frames:
                yield frames

    async def _read_on(self) -> None:
        try:
            while self._streams:
                turn = self._watch.turn
                try:
                    page = await asyncio.to_thread(self._log.after, self._position)
                except EvalfleetError:
                    page = []
                self._tell(page)
                if not page:
                    await self._watch.beyond(turn, _IDLE_S)
                await asyncio.sleep(LOOK_S)
        except Exception:
            log.exception("the events can't be read; who follows them is sent to come back")
            for stream in self._streams:
                stream.drop()
        finally:
            self._reading = None

    def _tell(self, page: list[Event]) -> None:
        if not page:
            return
        self._position = page[-1].seq
        told = [(event, _of(event)) for event in page]
        for stream in self._streams:
            stream.offer(told)


def _of(event: Event) -> bytes:
    return f"id: {event.seq}\nevent: {event.kind}\ndata: {event.data}\n\n".encode()


def _frame(kind: str, data: dict[str, object], *, seq: int | None = None) -> bytes:
    number = f"id: {seq}\n" if seq is not None else ""
    return f"{number}event: {kind}\ndata: {json.dumps(data)}\n\n".encode()
