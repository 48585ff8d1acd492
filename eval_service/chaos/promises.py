"""The promises, each a pure function from the evidence to what breaks it; an empty list is a promise kept."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from eval_service.chaos.evidence import Evidence, digests_of, directory_of, to_keep
from eval_service.chaos.faults import CUTS_THE_API, CUTS_THE_CONTROLLER, HOLDS_UP_WRITES, FaultKind
from eval_service.chaos.snapshots import BAD, Flaw
from eval_service.chaos.watch import Outage
from eval_service.chaos.world import SUITES
from eval_service.contract.states import ENDS, PointState, Reason
from eval_service.contract.wire import Overflow
from eval_service.engine.fake import fake_text

RECOVERY_S = 45.0
"""Within that a controller acts and a dispatch is answered again, after any fault but the whole service's death."""
RESTART_S = 120.0
_SHORT_S = 8.0  # an unanswered dispatch that needs no explanation: a machine so busy that Serve replaces the gateway
_AROUND_S = 1.0  # between what a fault's own times say and what is seen of it
_TOLD_AT_MOST = 5


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise, and what was seen of it."""

    name: str
    broken: tuple[str, ...]

    @property
    def kept(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.broken


@dataclass(frozen=True, slots=True)
class Recovery:
    """A time in which something was not done, since the last fault that may keep it from being done."""

    what: str
    took_s: float
    allowed_s: float


def check_promises(evidence: Evidence) -> list[Promise]:
    """All of them."""
    return [Promise(name, tuple(check(evidence))) for name, check in PROMISES.items()]


def _no_point_lost(evidence: Evidence) -> Iterator[str]:
    suites_by_reservation: dict[str, set[str]] = defaultdict(set)
    came: set[str] = set()
    for point in evidence.ledger.points:
        suites_by_reservation[point["reservation"]].add(point["suite"])
        if point["snapshot_id"] is not None:
            came.add(point["reservation"])
        if point["state"] not in ENDS:
            yield f"{_named(point)} is still {point['state']} ({point['detail']})"
    for run, diary in evidence.diaries.items():
        for entry in diary:
            known = entry["event"] in ("published", "posted") or entry.get("outcome") == "granted"
            if known and suites_by_reservation[entry["reservation"]] != set(SUITES):
                yield f"{entry['event']} {entry.get('path', entry['reservation'])} of {run} has no points"
            if entry["event"] == "published" and entry["reservation"] not in came:
                yield f"{entry['path']} was published and never taken in"
    yield from evidence.undrained


def _ends_are_right(evidence: Evidence) -> Iterator[str]:
    by_reservation = defaultdict(list)
    for point in evidence.ledger.points:
        by_reservation[point["reservation"]].append(point)
    for diary in evidence.diaries.values():
        begun = {entry["reservation"]: entry for entry in diary if entry["event"] == "begun"}
        flaws = {entry["reservation"]: entry["flaw"] for entry in diary if entry["event"] == "publishing"}
        published = {entry["reservation"] for entry in diary if entry["event"] == "published"}
        for reservation, entry in begun.items():
            for point in by_reservation[reservation]:
                expected = _expected(entry, flaws.get(reservation), reservation in published)
                if point["state"] in ENDS and not _is_expected(point, expected, evidence):
                    yield f"{_named(point)}: {_end(point)}, wanted {' or '.join(sorted(expected))}: {point['detail']}"
        for entry in diary:
            if entry["event"] == "refused":
                yield f"a dispatch was refused: {entry['detail']}"


def _expected(begun: dict[str, Any], flaw: str | None, published: bool) -> set[str]:
    if begun["kind"] == FaultKind.TRAINER_DISK_FULL:
        return {Reason.EXPORT_FAILED, Reason.RESERVATION_EXPIRED}
    if not published:
        return {Reason.RESERVATION_EXPIRED, Reason.BUSY}
    if flaw in BAD:
        return {Reason.SNAPSHOT_INVALID}
    return {Reason.PIN_VIOLATION} if flaw == Flaw.POISONED else {PointState.DONE}


def _is_expected(point: dict[str, Any], expected: set[str], evidence: Evidence) -> bool:
    if _end(point) in expected or point["superseded"]:
        return True
    may_skip = not point["force"] and evidence.world.run_spec(point["run"]).overflow is not Overflow.BACKPRESSURE
    return may_skip and point["reason"] == Reason.BUSY


def _nothing_doubled(evidence: Evidence) -> Iterator[str]:
    done = Counter(row["point"] for row in evidence.ledger.attempts if row["outcome"] == "done")
    twice = Counter((point["reservation"], point["suite"]) for point in evidence.ledger.points)
    yield from (f"{key} is {count} points" for key, count in twice.items() if count > 1)
    for point in evidence.ledger.points:
        if done[point["id"]] != (point["state"] == PointState.DONE):
            yield f"{_named(point)} is {point['state']} and has {done[point['id']]} attempts that are done"
    counting = Counter(
        (point["run"], point["step"], point["suite"], point["snapshot_id"])
        for point in evidence.ledger.points
        if point["state"] == PointState.DONE and not point["superseded"]
    )
    yield from (f"{key[:3]} counts {count} times" for key, count in counting.items() if count > 1)
    yield from _overlaps(evidence)


def _overlaps(evidence: Evidence) -> Iterator[str]:
    """No point ever has two live attempts."""
    by_point: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in evidence.ledger.attempts:
        by_point[row["point"]].append(row)
    for point, rows in by_point.items():
        rows.sort(key=lambda row: row["number"])
        for former, later in pairwise(rows):
            if former["ended_at"] is None or former["ended_at"] > later["started_at"]:
                yield f"attempts {former['number']} and {later['number']} of {point} lived at once"
        if rows[-1]["ended_at"] is None:
            yield f"attempt {rows[-1]['number']} of {point} has not ended"


def _made(evidence: Evidence) -> dict[str, dict[str, Any]]:
    """What was published under each reservation."""
    entries = [entry for diary in evidence.diaries.values() for entry in diary]
    return {entry["reservation"]: entry for entry in entries if entry["event"] == "publishing"}


def _samples_are_right(evidence: Evidence) -> Iterator[str]:
    made = _made(evidence)
    for point in evidence.ledger.points:
        if point["state"] != PointState.DONE:
            continue
        samples, source = evidence.samples[point["id"]], made.get(point["reservation"])
        if isinstance(samples, str) or source is None:
            yield f"{_named(point)} has no samples: {samples if isinstance(samples, str) else 'nobody made it'}"
            continue
        if sorted(sample.index for sample in samples) != list(range(SUITES[point["suite"]])):
            yield f"{_named(point)} has {len(samples)} samples of {SUITES[point['suite']]}, or one twice"
        versions = {sample.weight_version for sample in samples}
        if versions != {point["weight_version"]}:
            yield f"{_named(point)} was pinned as {point['weight_version']}, its samples say {sorted(versions)}"
        wrong = [sample for sample in samples if sample.output != _right(source, sample.prompt)]
        if wrong:
            yield f"{_named(point)}: {len(wrong)} samples are of other weights, such as {wrong[0].output!r}"
        right = sum(sample.prompt in source["answers"] for sample in samples) / max(1, len(samples))
        if point["score"] is None or abs(point["score"] - right) > 1e-9:
            yield f"{_named(point)} scores {point['score']}; its bytes score {right}"


def _right(source: dict[str, Any], prompt: str) -> str:
    """What the bytes of a snapshot answer."""
    return str(source["answers"].get(prompt, fake_text(source["tensor_digest"], prompt)))


def _served_by_its_own_weights(evidence: Evidence) -> Iterator[str]:
    made = _made(evidence)
    points = {point["id"]: point for point in evidence.ledger.points}
    digests = {row["id"]: row["digest"] for row in evidence.ledger.snapshots}
    for answer in evidence.served.answers:
        point = points[answer.point]
        if not answer.label.startswith(digests[point["snapshot_id"]][:8]):
            yield f"{_named(point)} was served as {answer.label}, which is another snapshot"
        if answer.text != _right(made[point["reservation"]], answer.prompt):
            yield f"{_named(point)} was served with other weights: {answer.prompt!r} got {answer.text!r}"
    if evidence.served.silent is not None:
        yield f"nobody was served when all was over: {evidence.served.silent}"


def _nothing_in_use_deleted(evidence: Evidence) -> Iterator[str]:
    yield from (f"{path} was gone while a point needed it" for path in evidence.seen.deleted_in_use)


def _keep_respected(evidence: Evidence) -> Iterator[str]:
    for run in evidence.diaries:
        keep, found = evidence.world.run_spec(run).keep, set(evidence.kept[run])
        wanted = to_keep(evidence.ledger, run, keep)
        held = {digest[:8] for digest in evidence.pinned}
        spare = {name for name, digest8 in digests_of(found).items() if digest8 in held}
        if found - spare != wanted - spare:
            yield f"{run} keeps {keep} and the best; too many: {sorted(found - wanted)}, gone: {sorted(wanted - found)}"
        for row in evidence.ledger.snapshots:
            if row["run"] == run and (row["deleted_at"] is None) != (directory_of(row) in found):
                yield f"the ledger is wrong of {row['path']}: deleted_at is {row['deleted_at']}"


def _one_controller(evidence: Evidence) -> Iterator[str]:
    yield from evidence.seen.old_epochs
    rows = sorted(evidence.ledger.attempts, key=lambda row: row["started_at"])
    for former, later in pairwise(rows):
        if later["epoch"] < former["epoch"]:
            yield f"epoch {later['epoch']} began an attempt at {later['point']} after epoch {former['epoch']} had"


def _no_orphans(evidence: Evidence) -> Iterator[str]:
    yield from evidence.orphans
    yield from (f"{path} was left" for path in evidence.scraps)


def _dispatch_answered(evidence: Evidence) -> Iterator[str]:
    if not evidence.seen.probes:
        yield "not one dispatch was answered"
    for outage in unexplained(evidence):
        if outage.lasted_s > _SHORT_S:
            yield f"no dispatch was answered for {outage.lasted_s:.1f} s, with no fault to the API: {outage.why}"


def unexplained(evidence: Evidence) -> Iterator[Outage]:
    """Times without an answer to a dispatch, and with no fault to the API that could have caused them."""
    after_s = dict.fromkeys(CUTS_THE_API, RECOVERY_S) | dict.fromkeys(HOLDS_UP_WRITES, _AROUND_S)
    cuts = [(done, after_s[done.fault.kind]) for done in evidence.faults if done.fault.kind in after_s]
    for outage in evidence.seen.outages:
        until = outage.until + _AROUND_S
        if not any(cut.began_at <= until and cut.ended_at + lasts_s >= outage.since for cut, lasts_s in cuts):
            yield outage


def _recovers(evidence: Evidence) -> Iterator[str]:
    for one in recoveries(evidence):
        if one.took_s > one.allowed_s:
            yield f"{one.what} for {one.took_s:.1f} s"


def recoveries(evidence: Evidence) -> Iterator[Recovery]:
    """All of them; one fault upon another starts the time anew."""
    api = CUTS_THE_API | HOLDS_UP_WRITES
    spans = [(outage.since, outage.until, "dispatch was unanswered", api) for outage in evidence.seen.outages]
    spans += [(*silence, "no controller acted", CUTS_THE_CONTROLLER) for silence in evidence.seen.silences]
    for since, until, what, kinds in spans:
        during = [done for done in evidence.faults if done.began_at <= until and done.ended_at >= since]
        restarted = any(done.fault.kind is FaultKind.KILL_SERVICE for done in during)
        turns = [at for done in during if done.fault.kind in kinds for at in (done.began_at, done.ended_at)]
        moments = sorted([since, until, *(at for at in turns if since < at < until)])
        longest = max(later - former for former, later in pairwise(moments))
        yield Recovery(what, longest, RESTART_S if restarted else RECOVERY_S)


def _no_idle_engine(evidence: Evidence) -> Iterator[str]:
    yield from evidence.seen.idleness.told.values()


def _all_landed(evidence: Evidence) -> Iterator[str]:
    yield from evidence.unplanned
    yield from evidence.trainer_failures


PROMISES: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "every fault landed": _all_landed,
    "no point is lost": _no_point_lost,
    "sound snapshots are done, the others end for their own reason": _ends_are_right,
    "no result is doubled": _nothing_doubled,
    "every sample and score is of its own snapshot's bytes": _samples_are_right,
    "who talks to a point is answered by its own weights": _served_by_its_own_weights,
    "no snapshot in use is deleted": _nothing_in_use_deleted,
    "as many snapshots are kept as the run says": _keep_respected,
    "one controller acts": _one_controller,
    "no process and no half-written directory is left": _no_orphans,
    "every dispatch is answered": _dispatch_answered,
    "the service recovers in time": _recovers,
    "no engine is idle beside a point that may have it, and no point is stuck": _no_idle_engine,
}


def told(promise: Promise) -> list[str]:
    """What breaks a promise, cut to what can be read."""
    more = len(promise.broken) - _TOLD_AT_MOST
    return [*promise.broken[:_TOLD_AT_MOST], *([f"and {more} more"] if more > 0 else [])]


def _named(point: dict[str, Any]) -> str:
    return f"{point['run']} step {point['step']} {point['suite']} ({point['id'][:8]})"


def _end(point: dict[str, Any]) -> str:
    return str(point["reason"] or point["state"])
