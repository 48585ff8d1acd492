"""What can only be seen while it happens: a snapshot deleted under a point, two controllers that act, a dispatch that
nobody answers, an engine that stands idle beside work. Threads of their own look all the time; they write nothing but
reservations of a run of their own.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from eval_service.chaos.idleness import Idleness
from eval_service.chaos.records import Records
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import EvalfleetError, Unavailable
from eval_service.contract.wire import DispatchRequest, RunSpec

PROBE_RUN = "probe"
_LOOK_S = 0.15
_PROBE_S = 0.5
_ANSWER_S = 6.0


@dataclass(frozen=True, slots=True)
class Outage:
    """No dispatch was answered between two Unix times."""

    since: float
    until: float
    why: str

    @property
    def lasted_s(self) -> float:
        """How long."""
        return self.until - self.since


@dataclass(slots=True)
class Seen:
    """What the watchers have seen."""

    deleted_in_use: list[str] = field(default_factory=list)
    old_epochs: list[str] = field(default_factory=list)
    silences: list[tuple[float, float]] = field(default_factory=list)  # since, until: no controller showed itself
    outages: list[Outage] = field(default_factory=list)
    idleness: Idleness = field(default_factory=Idleness)
    probes: int = 0
    slowest_s: float = 0.0


class Watch:
    """Both watchers; use it as a context."""

    def __init__(self, ledger: Path, url: str, spec: RunSpec) -> None:
        self.seen = Seen()
        self._records = Records(ledger)
        self._url = url
        self._spec = spec
        self._ending = threading.Event()
        self._probed_enough = threading.Event()
        self._answered = False
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._look, self._probe)]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def answered(self) -> bool:
        """Whether the last dispatch was answered."""
        return self._answered

    def end_probing(self) -> None:
        """Send no more dispatches; go on looking."""
        self._probed_enough.set()

    def end(self) -> Seen:
        """Stop looking."""
        self._ending.set()
        self._probed_enough.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2 * _ANSWER_S)
        self._records.close()
        return self.seen

    def _look(self) -> None:
        highest, quiet_since = 0, time.time()
        while not self._ending.wait(_LOOK_S):
            acting = self._records.acting()
            if acting is not None:
                if acting.shown < highest:
                    told = f"epoch {acting.shown} acted at {acting.shown_at:.2f}, after epoch {highest} had"
                    if told not in self.seen.old_epochs:
                        self.seen.old_epochs.append(told)
                highest = max(highest, acting.shown)
                if acting.shown_at > quiet_since:
                    self.seen.silences.append((quiet_since, acting.shown_at))
                    quiet_since = acting.shown_at
            self._look_at_files()
            moment = self._records.moment()
            if moment is not None:
                self.seen.idleness.look(moment)

    def _look_at_files(self) -> None:
        missing = [path for path in self._records.in_use() if not Path(path).is_dir()]
        if missing:
            # The point may have ended between the two looks; it is wrong only if it is still open.
            still = self._records.in_use()
            for path in missing:
                if path in still and not Path(path).is_dir() and path not in self.seen.deleted_in_use:
                    self.seen.deleted_in_use.append(path)

    def _probe(self) -> None:
        good_at, why = time.time(), ""
        with EvalClient(self._url, timeout_s=_ANSWER_S) as client:
            while not self._probed_enough.wait(_PROBE_S):
                began = time.time()
                try:
                    self._ask(client)
                except Unavailable as exc:
                    why, self._answered = why or str(exc), False
                    continue
                except EvalfleetError:
                    pass  # an answer
                now, self._answered = time.time(), True
                self.seen.probes += 1
                if why:
                    self.seen.outages.append(Outage(good_at, now, why))
                else:
                    self.seen.slowest_s = max(self.seen.slowest_s, now - began)
                good_at, why = now, ""
        if why:
            self.seen.outages.append(Outage(good_at, time.time(), why))

    def _ask(self, client: EvalClient) -> None:
        if self.seen.probes == 0:
            client.put_run(PROBE_RUN, self._spec)
        client.dispatch(DispatchRequest(run=PROBE_RUN, step=self.seen.probes, reservation=str(uuid.uuid4())))


def wait_until(look: Callable[[], bool], timeout_s: float, pause_s: float = 0.2) -> bool:
    """Look until it holds; whether it did in time."""
    until = time.monotonic() + timeout_s
    while not look():
        if time.monotonic() > until:
            return False
        time.sleep(pause_s)
    return True
