"""Drain: the exporter is joined, what was kept is sent, then the service is waited for, under one deadline.

There is a receipt in any case.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from eval_service.contract import names
from eval_service.contract.errors import EvalfleetError
from eval_service.contract.outbox import Outbox
from eval_service.contract.states import Reason
from eval_service.contract.wire import EndedPoint, PlannedPoint, Receipt
from trainer.eval_hook import EvalHook
from trainer.steplog import StepLog

RETRY_S = 1.0


def drain(
    hook: EvalHook,
    *,
    output_dir: Path,
    on_progress: Callable[[Receipt], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Receipt:
    """Wait until every planned point has ended, or the deadline; the receipt is saved beside the log.

    Never raises for the service's sake: away until the deadline, the receipt says so and lies in the outbox too.
    """
    link, log, section = hook.link, hook.log, hook.config.eval
    until = clock() + section.drain_timeout_s
    if not hook.join(section.drain_timeout_s):
        log.write("export_abandoned", detail="an export was still being written at the drain's deadline")
    log.write("drain_begin", planned=len(hook.planned))
    link.stop()
    _quietly(lambda: _tell_unreadable(link.outbox, log), log)
    started_at = time.time()
    try:
        _flush_until(link.flush, until, clock)
        receipt = link.client.drain(
            link.run,
            planned=hook.planned,
            timeout_s=max(0.0, until - clock()),
            on_timeout=section.on_timeout,
            on_progress=on_progress,
        )
        _quietly(lambda: link.outbox.drop(link.outbox.directory / names.RECEIPT), log)
    except EvalfleetError as exc:
        log.write("service_away", detail=str(exc))
        receipt = _own_receipt(hook, started_at, section.drain_timeout_s)
        _quietly(lambda: link.outbox.put_receipt(receipt), log)
    _quietly(lambda: (output_dir / names.RECEIPT).write_text(receipt.model_dump_json(indent=1)), log)
    log.write("drain_end", drained=receipt.drained, **_counts(receipt))
    return receipt


def summary(receipt: Receipt) -> str:
    """One line for people."""
    counts = ", ".join(f"{count} {what}" for what, count in _counts(receipt).items() if count)
    return f"{'drained' if receipt.drained else 'not drained'}: {counts or 'no points'}"


def _flush_until(flush: Callable[[], bool], until: float, clock: Callable[[], float]) -> None:
    never = threading.Event()
    while not flush() and clock() < until:
        never.wait(min(RETRY_S, max(0.0, until - clock())))


def _tell_unreadable(outbox: Outbox, log: StepLog) -> None:
    for path in outbox.unreadable():
        log.write("outbox_unreadable", path=str(path))


def _own_receipt(hook: EvalHook, started_at: float, timeout_s: float) -> Receipt:
    kept = {(request.step, suite) for _, request in hook.link.pending() for suite in request.suites or ()}
    skipped = {(entry.step, entry.suite) for entry in hook.skipped}
    unknown = [entry for entry in hook.planned if (entry.step, entry.suite) not in kept | skipped]
    return Receipt(
        drain=str(uuid.uuid4()),
        run=hook.link.run,
        open=False,
        drained=False,
        timed_out=True,
        started_at=started_at,
        ended_at=time.time(),
        deadline=started_at + timeout_s,
        skipped=_lines(hook.skipped, Reason.BUSY, "the service was away"),
        deferred=tuple(EndedPoint(step=step, suite=suite, detail="in the outbox") for step, suite in sorted(kept)),
        pending=_lines(unknown, None, "the service was away; its end is not known here"),
    )


def _lines(points: Iterable[PlannedPoint], reason: Reason | None, detail: str) -> tuple[EndedPoint, ...]:
    return tuple(EndedPoint(step=entry.step, suite=entry.suite, reason=reason, detail=detail) for entry in points)


def _counts(receipt: Receipt) -> dict[str, int]:
    what = ("done", "skipped", "failed", "cancelled", "pending", "never_came", "deferred")
    return {name: len(getattr(receipt, name)) for name in what}


def _quietly(work: Callable[[], object], log: StepLog) -> None:
    try:
        work()
    except OSError as exc:
        log.write("receipt_failed", detail=str(exc))
