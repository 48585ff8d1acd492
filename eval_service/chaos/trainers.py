"""The simulated trainers' keeper: starts them, starts them again when they died, lets those go on that stopped
themselves, and shows the files that the slow file system has hidden, when their time has come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from eval_service.chaos.diary import Diary
from eval_service.chaos.faults import Fault
from eval_service.chaos.trainer import TrainerSpec
from eval_service.chaos.world import RESERVATION_TIMEOUT_S, World
from eval_service.demo.processes import Child, Family

_LOOK_S = 0.1
_BACK_S = 1.5  # how long a dead trainer is away
_STOPPED_S = 2.0
_LONG_STOP_S = RESERVATION_TIMEOUT_S + 4.0
_LONG_ONES = 3  # every third stop outlasts the reservation


@dataclass(slots=True)
class Trainers:
    """One trainer a run."""

    world: World
    family: Family
    runs: Sequence[str]
    say: Callable[[str], None]
    children: dict[str, Child] = field(default_factory=dict)
    deaths: int = 0
    failures: list[str] = field(default_factory=list)
    _stopped_at: dict[int, float] = field(default_factory=dict)
    _stops: int = 0
    _shown: set[str] = field(default_factory=set)
    _ending: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self, url: str, seed: int, faults: Sequence[Fault], *, least_steps: int, pace_s: float) -> None:
        """Write what they are told, start all, and keep them."""
        for number, run in enumerate(self.runs):
            spec = TrainerSpec(
                run=run,
                url=url,
                spec=self.world.run_spec(run),
                seed=seed,
                faults=tuple((fault.number, fault.kind, fault.variant) for fault in faults if fault.run == number),
                prompts=self.world.prompts,
                diary=self.world.diary(run),
                hidden=self.world.hidden,
                stop=self.world.stop,
                least_steps=least_steps,
                pace_s=pace_s,
                drain_timeout_s=90.0,
            )
            self.world.trainer_spec(run).write_text(spec.model_dump_json())
            self._launch(run)
        self._thread = threading.Thread(target=self._keep, name="trainers", daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float) -> bool:
        """Tell them to end, and wait for it; whether all did."""
        self.world.stop.touch()
        until = time.monotonic() + timeout_s
        while not self._all_ended() and time.monotonic() < until:
            time.sleep(_LOOK_S)
        self.abandon()
        return self._all_ended()

    def abandon(self) -> None:
        """Start none anew, whatever becomes of them."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(10.0)

    def diary(self, run: str) -> Diary:
        """A run's diary."""
        return Diary(self.world.diary(run))

    def _all_ended(self) -> bool:
        return all(child.process.poll() == 0 for child in self.children.values()) or bool(self.failures)

    def _launch(self, run: str) -> None:
        self.children[run] = self.family.start(
            f"trainer {run}",
            ["eval_service.chaos.trainer", str(self.world.trainer_spec(run))],
            log=self.world.logs / f"trainer-{run}.log",
            cwd=self.world.out,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def _keep(self) -> None:
        dead_at: dict[str, float] = {}
        while not self._ending.wait(_LOOK_S):
            self._show_files()
            for run, child in list(self.children.items()):
                code = child.process.poll()
                if code is None:
                    self._wake(child)
                elif code < 0 and run not in dead_at:
                    dead_at[run] = time.monotonic()
                elif code < 0 and time.monotonic() - dead_at[run] > _BACK_S:
                    del dead_at[run]
                    self.deaths += 1
                    self._launch(run)
                elif code > 0 and not self.failures:
                    self.failures.append(f"trainer {run} ended with code {code}:\n{child.tail()}")
        self._show_files(all_of_them=True)

    def _wake(self, child: Child) -> None:
        pid = child.process.pid
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_STOPPED:
                self._stopped_at.pop(pid, None)
                return
            if pid not in self._stopped_at:
                self._stops += 1
            since = self._stopped_at.setdefault(pid, time.monotonic())
            hold_s = _LONG_STOP_S if self._stops % _LONG_ONES == 0 else _STOPPED_S
            if time.monotonic() - since > hold_s:
                process.resume()
        except psutil.Error:
            return

    def _show_files(self, *, all_of_them: bool = False) -> None:
        for run in self.runs:
            for hidden in self.diary(run).events("hidden"):
                if hidden["place"] not in self._shown and (all_of_them or time.time() >= hidden["until"]):
                    place, path = Path(hidden["place"]), Path(hidden["path"])
                    if place.exists() and path.parent.is_dir():
                        place.rename(path)
                        self._shown.add(hidden["place"])
