"""The trainer's side of the service: announces the run, tells progress, and sends what was kept while it was away.

Invariant: nothing here raises for a service that is away, answers late or answers with an error, nor for an outbox that
can't be read; what could not be sent is in the outbox, and what was refused is in the step log.
"""

from __future__ import annotations

import threading
from pathlib import Path

from eval_service.contract.client import EvalClient
from eval_service.contract.errors import (
    ConfigError,
    EvalfleetError,
    Forbidden,
    InvalidRequest,
    NotFound,
    RateLimited,
    Unauthorized,
    Unavailable,
)
from eval_service.contract.outbox import Outbox
from eval_service.contract.states import Reason
from eval_service.contract.token import read_token_lines
from eval_service.contract.wire import DispatchRequest, RunSpec
from trainer.config import EvalSection, Evaluated
from trainer.steplog import StepLog

_JOIN_S = 10.0
# What may go better later, by itself or once somebody has changed a token: nothing is given up for it.
LATER = (Unavailable, RateLimited, Unauthorized, Forbidden)


class ServiceLink:
    """One run's link. Its thread tells the step every few seconds; everything else runs on the caller's."""

    def __init__(self, config: Evaluated, client: EvalClient, log: StepLog) -> None:
        self.run = config.run.name
        self.client = client
        self.outbox = Outbox.of(config.run.root, config.run.name)
        self._spec = run_spec(config)
        self._progress_interval_s = config.eval.progress_interval_s
        self._log = log
        self._announced = False
        self._reports: list[tuple[str, str, Reason]] = []
        self._lock = threading.Lock()
        self._step: int | None = None
        self._ending = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="evalfleet-progress", daemon=True)

    def check(self) -> None:
        """Announce the run at start-up, when a refusal can still be mended.

        Raises:
            ConfigError: the service refuses the run (an unknown suite, a root that is not one of its own, no token).
        """
        try:
            self._announce()
        except InvalidRequest as exc:
            raise ConfigError(f"the service refuses the run: {exc.message}", field=exc.field, hint=exc.hint) from exc
        except (Unauthorized, Forbidden) as exc:
            hint = "put a token that may dispatch into EVALFLEET_TOKEN, or name its file with eval.token_file"
            raise ConfigError(
                f"the service refuses the run: {exc.message}", field="eval.token_file", hint=hint
            ) from exc
        except EvalfleetError as exc:
            self._log.write("service_away", detail=str(exc))

    def start(self, step: int) -> None:
        """Begin to tell progress."""
        self._step = step
        self._thread.start()

    def at_step(self, step: int) -> None:
        """The trainer has completed `step`."""
        self._step = step

    def nudge(self) -> None:
        """Tell the step now, and not at the next turn."""
        self._wake.set()

    def report(self, point: str, detail: str, reason: Reason) -> None:
        """A reserved point gets no snapshot; told again later if the service is away."""
        self._reports.append((point, detail, reason))
        self.flush()

    def keep(self, request: DispatchRequest) -> None:
        """Put a request that could not be sent into the outbox."""
        self.outbox.put(request)

    def unsent(self) -> int:
        """Snapshots in the outbox."""
        return len(self.pending())

    def pending(self) -> list[tuple[Path, DispatchRequest]]:
        """What is in the outbox, oldest step first; nothing while shared storage is away."""
        try:
            return list(self.outbox.pending())
        except OSError as exc:
            self._log.write("outbox_away", detail=str(exc))
            return []

    def flush(self) -> bool:
        """Send whatever is waiting; tells whether nothing is left."""
        with self._lock:
            try:
                self._announce()
                self._send_reports()
                for path, request in self.pending():
                    self._send(request)
                    self._drop(path)
            except EvalfleetError as exc:
                self._log.write("service_away", detail=str(exc))
                return False
            return True

    def stop(self) -> None:
        """End the thread, and tell the last step."""
        self._ending = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_S)
        self._tell_once()

    def _announce(self) -> None:
        if not self._announced:
            self.client.put_run(self.run, self._spec)
            self._announced = True

    def _send_reports(self) -> None:
        while self._reports:
            point, detail, reason = self._reports[0]
            try:
                self.client.report(point, detail, reason)
            except LATER:
                raise
            except EvalfleetError as exc:
                self._log.write("report_refused", point=point, detail=str(exc))
            self._reports.pop(0)

    def _drop(self, path: Path) -> None:
        try:
            self.outbox.drop(path)
        except OSError as exc:  # it is sent again then, which is the same points
            self._log.write("outbox_away", detail=str(exc))

    def _send(self, request: DispatchRequest) -> None:
        try:
            reply = self.client.dispatch(request)
        except LATER:
            raise
        except NotFound as exc:
            self._announced = False
            raise Unavailable(exc.message) from exc
        except EvalfleetError as exc:
            self._log.write("eval_refused", step=request.step, detail=str(exc))
        else:
            self._log.write("eval_dispatched", step=request.step, outcome=reply.outcome, from_outbox=True)

    def _tell(self) -> None:
        while not self._ending:
            self._tell_once()
            if self.unsent():
                self.flush()
            self._wake.wait(self._progress_interval_s)
            self._wake.clear()

    def _tell_once(self) -> None:
        if self._step is None or not self._announced:
            return
        try:
            self.client.progress(self.run, self._step)
        except NotFound as exc:
            self._announced = False  # a service with another ledger: the next flush makes the run known to it
            self._log.write("run_unknown", detail=str(exc))
        except EvalfleetError as exc:
            self._log.write("service_away", detail=str(exc))


def token_of(section: EvalSection) -> str | None:
    """What the run's file names; None: the environment's, if any.

    Raises:
        ConfigError: the file can't be read.
    """
    return None if section.token_file is None else read_token_lines(section.token_file, "eval.token_file")[0]


def run_spec(config: Evaluated) -> RunSpec:
    """What the service is told of the run."""
    section = config.eval
    return RunSpec(
        root=str(config.run.root),
        suites=section.suites,
        overflow=section.overflow,
        max_in_flight=section.max_in_flight,
        keep=section.keep,
        priority=section.priority,
        max_engines=section.max_engines,
        num_steps=config.num_steps,
    )
