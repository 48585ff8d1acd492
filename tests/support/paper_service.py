"""The real gateway and the real ledger, without Ray: a controller on paper checks snapshots by the real admission
checks and gives each point that may run a result at once.

A trainer's or a command's real client talks to it over a transport of its own, from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from eval_service.admission.checks import find_faults
from eval_service.admission.faults import FaultCode
from eval_service.contract.client import EvalClient
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import PointView, Source
from eval_service.ledger.moves import Facts
from tests.support.api import Api


@dataclass
class PaperService(Api):
    """`works` says whether queued points get their results; `calls` are the requests that came, in order."""

    works: bool = True
    away: Callable[[str], bool] = lambda _: False
    calls: list[str] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def root(self) -> Path:
        """The only root that the service allows."""
        return self.ledger.root

    def connect(self, url: str = "http://paper") -> EvalClient:
        """What `EvalClient(url)` is, to this service."""
        return EvalClient(url, transport=httpx.MockTransport(self._handle))

    def points(self, run: str) -> list[PointView]:
        """Those that count, by step."""
        found = [point for point in self.ledger.views.points(run=run).points if not point.superseded]
        return sorted(found, key=lambda point: (point.step, point.suite))

    def work(self) -> None:
        """What a controller does until nothing is left to be done."""
        self.ledger.look()
        for snapshot in self.ledger.moves.unadmitted():
            report = find_faults(
                Path(snapshot.path),
                source=Source(snapshot.source),
                roots=(self.root,),
                expect_digest=snapshot.claimed_digest,
                run=snapshot.run,
                step=snapshot.step,
            )
            if report.ok and report.manifest is not None and report.facts is not None:
                self.ledger.moves.admit(snapshot.id, Facts(report.manifest, report.facts.vocab_size))
            else:
                missing = report.faults[0].code is FaultCode.MISSING
                reason = Reason.CKPT_MISSING if missing else Reason.SNAPSHOT_INVALID
                self.ledger.moves.refuse(snapshot.id, reason, str(report.faults[0].error()), report.manifest)
        if self.works:
            for point in self.ledger.views.points(state=PointState.QUEUED).points:
                self.ledger.go(point.id, PointState.DONE)
        self.ledger.look()

    def _wake(self) -> None:
        self.woken += 1
        self.work()

    def _handle(self, request: httpx.Request) -> httpx.Response:
        call = f"{request.method} {request.url.path}"
        with self.lock:
            self.calls.append(call)
            if self.away(call):
                raise httpx.ConnectError("connection refused", request=request)
            answer = self.request(
                request.method,
                str(request.url.raw_path, "ascii"),
                content=request.content,
                headers={"content-type": "application/json"},
            )
            return httpx.Response(answer.status_code, content=answer.content)
