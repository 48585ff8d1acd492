"""A simulated trainer: reserve, export, publish, dispatch, keep what can't be sent, drain; it uses the contract alone.

It brings about the faults of its own exports, tells them to its diary before it does (what dies can't tell), and when
it is started again it goes on from there, as a trainer resumes from its last checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from eval_service.chaos.diary import Diary
from eval_service.chaos.faults import FaultKind
from eval_service.chaos.snapshots import BAD, Flaw, canary_of, flip_byte, make_model
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import Busy, EvalfleetError, Unavailable
from eval_service.contract.manifest import tensors_digest
from eval_service.contract.outbox import Outbox
from eval_service.contract.snapshot import Published, SnapshotWriter
from eval_service.contract.wire import DispatchReply, DispatchRequest, Granted, PlannedPoint, RunSpec

_ROOM_S = 10.0  # how long a reservation waits for room
_LATE_S = (1.0, 3.0)
_SAME_BYTES, _OTHER_BYTES = 0.4, 0.7  # below: what a trainer that comes back does with the step that it died at


class TrainerSpec(BaseModel):
    """What one trainer is told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    url: str
    spec: RunSpec
    seed: int
    faults: tuple[tuple[int, FaultKind, float], ...]  # number, kind, variant
    prompts: Path
    diary: Path
    hidden: Path  # where files lie that a slow file system does not show yet
    stop: Path  # once this is there it ends, when all of its faults have landed
    least_steps: int
    pace_s: float
    drain_timeout_s: float


@dataclass(slots=True)
class Export:
    """One step's export."""

    step: int
    version: int
    fault: tuple[int, FaultKind, float] | None
    reservation: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def kind(self) -> FaultKind | None:
        """What befalls it."""
        return self.fault[1] if self.fault else None

    @property
    def flaw(self) -> Flaw | None:
        """What is wrong with what it writes."""
        if self.kind is FaultKind.POISONED_SNAPSHOT:
            return Flaw.POISONED
        return BAD[int(self.fault[2] * len(BAD))] if self.fault and self.kind is FaultKind.BAD_SNAPSHOT else None


class SimulatedTrainer:
    """One life of a run's trainer."""

    def __init__(self, spec: TrainerSpec, client: EvalClient) -> None:
        self._spec = spec
        self._client = client
        self._diary = Diary(spec.diary)
        self._outbox = Outbox.of(spec.spec.root, spec.run)
        rows = [json.loads(line) for line in spec.prompts.read_text().splitlines()]
        self._prompts = {row["prompt"]: row["answer"] for row in rows}
        self._reports: list[str] = []
        self._announced = False

    def live(self) -> None:
        """Train to the end."""
        self._diary.write("life", pid=os.getpid())
        for export in self._resumed():
            self._step(export)
            time.sleep(self._spec.pace_s)
        self._drain()

    def _resumed(self) -> Any:
        """The exports of this life: what was under way first, then on until there is nothing left to do."""
        begun = self._diary.events("begun")
        last = begun[-1] if begun else None
        step, version = (last["step"], last["version"]) if last else (-1, 0)
        if last is not None and not self._finished(last):
            pick = 0.0 if last["kind"] == FaultKind.KILL_TRAINER_EXPORTING else last["variant"]
            if pick < _OTHER_BYTES:
                version += pick >= _SAME_BYTES
                yield Export(step, version, None)
        while not (self._left() is None and self._spec.stop.exists() and step + 1 >= self._spec.least_steps):
            step += 1
            yield Export(step, 0, self._left())

    def _finished(self, begun: dict[str, Any]) -> bool:
        ends = self._diary.events("handed_over", "skipped", "failed")
        return any(end["reservation"] == begun["reservation"] for end in ends)

    def _left(self) -> tuple[int, FaultKind, float] | None:
        landed = {entry["fault"] for entry in self._diary.events("landed")}
        return next((fault for fault in self._spec.faults if fault[0] not in landed), None)

    # --- one step

    def _step(self, export: Export) -> None:
        self._flush()
        variant = export.fault[2] if export.fault else 0.0
        told = {"step": export.step, "version": export.version, "kind": export.kind, "variant": variant}
        self._diary.write("begun", reservation=export.reservation, **told)
        reply = self._reserve(export)
        if reply is None and not export.fault and len(self._outbox.files()) >= self._spec.spec.max_in_flight:
            self._diary.write("skipped", reservation=export.reservation)  # as many wait already as it grants itself
            return
        if reply is not None and reply.outcome is Granted.SKIPPED:
            self._diary.write("skipped", reservation=export.reservation)
            return
        if export.kind is FaultKind.STOP_TRAINER:
            self._landed(export)
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            published = self._export(export)
        except OSError as exc:
            self._diary.write("failed", reservation=export.reservation, detail=str(exc), granted=reply is not None)
            self._reports += [point.id for point in reply.points] if reply else []
            self._report()
            return
        self._hand_over(export, published, away=reply is None)

    def _request(self, export: Export, **changes: Any) -> DispatchRequest:
        return DispatchRequest(
            run=self._spec.run,
            step=export.step,
            reservation=export.reservation,
            force=export.fault is not None,  # what has a fault has to come, or the fault would not land
            **changes,
        )

    def _reserve(self, export: Export) -> DispatchReply | None:
        """The reply; None while the service is away, when it grants itself what it exports."""
        if not self._announced:
            return None
        try:
            reply = self._client.reserve(self._request(export), deadline_s=_ROOM_S)
        except (Unavailable, Busy) as exc:
            self._diary.write("away", detail=str(exc), reservation=export.reservation)
            return None
        self._diary.write("reserved", reservation=export.reservation, outcome=reply.outcome)
        return reply

    def _export(self, export: Export) -> Published:
        spec = self._spec
        seed = f"{spec.seed}-{spec.run}-{export.step}-{export.version}"
        model = make_model(seed, self._prompts, flaw=export.flaw)
        with SnapshotWriter(Path(spec.spec.root), spec.run, export.step, "evalfleet chaos") as writer:
            for number, (name, tensors) in enumerate(model.shards()):
                writer.add_weights(name, tensors)
                if number == 0 and export.kind is FaultKind.KILL_TRAINER_EXPORTING:
                    self._die(export)
            if export.kind is FaultKind.TRAINER_DISK_FULL:
                self._landed(export)
                (writer.partial / "config.json").symlink_to("/dev/full")  # the kernel's own ENOSPC
            for name, data in model.files().items():
                writer.add_bytes(name, data)
            digest = tensors_digest(writer.tensors)
            self._diary.write(
                "publishing",
                reservation=export.reservation,
                step=export.step,
                flaw=export.flaw,
                tensor_digest=digest,
                answers=model.answers,
            )
            request = self._request(export).model_dump(mode="json")
            published = writer.publish(canary=canary_of(digest, export.flaw), dispatch=[request])
        self._diary.write("published", reservation=export.reservation, path=str(published.path))
        return published

    # --- after the rename

    def _hand_over(self, export: Export, published: Published, *, away: bool) -> None:
        if export.kind is FaultKind.KILL_TRAINER_UNSENT:
            self._die(export)
        self._spoil(export, published)
        digest = published.manifest.digest
        request = self._request(export, snapshot=str(published.path), digest=digest, deferred=away)
        if export.kind is FaultKind.DAMAGED_OUTBOX:
            self._damage(export, request)
        else:
            self._send(request)
        self._diary.write("handed_over", reservation=export.reservation)

    def _spoil(self, export: Export, published: Published) -> None:
        if export.flaw is not None:
            self._landed(export)
        if export.flaw is Flaw.FLIPPED_BYTE:
            flip_byte(published.path)
        if export.kind is FaultKind.LATE_FILES and export.fault is not None:
            weights = sorted(published.path.glob("*.safetensors"))[0]
            place = self._spec.hidden / f"{export.reservation}-{weights.name}"
            until = time.time() + _LATE_S[0] + export.fault[2] * (_LATE_S[1] - _LATE_S[0])
            self._diary.write("hidden", path=str(weights), place=str(place), until=until)
            weights.rename(place)
            self._landed(export)

    def _damage(self, export: Export, request: DispatchRequest) -> None:
        path = self._outbox.put(request.model_copy(update={"deferred": True}))
        beside = path.with_suffix(".half")
        beside.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        beside.replace(path)
        self._landed(export)

    def _send(self, request: DispatchRequest) -> None:
        try:
            reply = self._client.dispatch(request) if self._announce() else None
        except Unavailable:
            reply = None
        except EvalfleetError as exc:
            self._diary.write("refused", reservation=request.reservation, detail=str(exc))
            return
        if reply is None:
            self._outbox.put(request.model_copy(update={"deferred": True}))
            self._diary.write("kept", reservation=request.reservation)
        else:
            self._diary.write("posted", reservation=request.reservation, outcome=reply.outcome)

    # --- the service

    def _announce(self) -> bool:
        """Whether the service knows of the run."""
        if not self._announced:
            try:
                self._client.put_run(self._spec.run, self._spec.spec)
                self._announced = True
            except Unavailable as exc:
                self._diary.write("away", detail=str(exc))
        return self._announced

    def _flush(self) -> None:
        if not self._announce():
            return
        self._report()
        for path, request in self._outbox.pending():
            try:
                self._client.dispatch(request)
            except Unavailable:
                return
            except EvalfleetError as exc:
                self._diary.write("refused", reservation=request.reservation, detail=str(exc))
            self._outbox.drop(path)

    def _report(self) -> None:
        while self._reports:
            try:
                self._client.report(self._reports[0], "No space left on device")
            except Unavailable:
                return
            except EvalfleetError as exc:
                self._diary.write("report_refused", detail=str(exc))
            self._reports.pop(0)

    def _drain(self) -> None:
        self._flush()
        steps = sorted({entry["step"] for entry in self._diary.events("begun")})
        planned = [PlannedPoint(step=step, suite=suite) for step in steps for suite in self._spec.spec.suites]
        try:
            receipt = self._client.drain(self._spec.run, planned=planned, timeout_s=self._spec.drain_timeout_s)
        except EvalfleetError as exc:
            self._diary.write("undrained", detail=str(exc))
        else:
            pending = [f"{point.step} {point.suite}: {point.reason}" for point in receipt.pending]
            self._diary.write("drained", drained=receipt.drained, pending=pending)

    # --- faults

    def _landed(self, export: Export) -> None:
        assert export.fault is not None
        self._diary.write("landed", fault=export.fault[0], kind=export.fault[1], reservation=export.reservation)

    def _die(self, export: Export) -> None:
        self._landed(export)
        os.kill(os.getpid(), signal.SIGKILL)


def main(argv: Sequence[str]) -> None:
    """Live as the spec in the named file says."""
    spec = TrainerSpec.model_validate_json(Path(argv[0]).read_text())
    with EvalClient(spec.url, timeout_s=5.0) as client:
        SimulatedTrainer(spec, client).live()


if __name__ == "__main__":
    main(sys.argv[1:])
