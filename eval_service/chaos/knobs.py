"""A fault's knob at one fake engine, turned by files (engine/fake.py): on for so many times, told each time, or off."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import psutil

from eval_service.chaos.faults import Fault, FaultKind
from eval_service.chaos.victims import alive

_number = itertools.count()  # orders are read in the order of their files' names


@dataclass(slots=True, eq=False)
class Knob:
    """What one engine is ordered; a server that is started anew has not heard of it."""

    orders: Path
    process: psutil.Process
    fault: Fault
    _before: int | None = None
    _off: Path | None = None

    def on(self) -> None:
        """Order it."""
        self._before = self._told()
        self._write(self.fault.times)

    def off(self) -> None:
        """Take it back, in a file of its own that is read after the other, so that neither replaces one unread."""
        self._off = self._write(0)

    def bitten(self) -> bool:
        """Whether it was felt."""
        return self._before is not None and self._told() > self._before

    def over(self) -> bool:
        """Whether it can't be felt any more."""
        taken_back = self._off is not None and not self._off.exists()
        used_up = self._before is not None and self._told() >= self._before + self.fault.times
        return taken_back or used_up or not alive(self.process)

    def _write(self, times: int) -> Path:
        path = self.orders / f"{self.process.pid}-{next(_number):09}.json"
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps({"knob": self._knob, "value": self._value, "times": times}))
        beside.replace(path)
        return path

    @property
    def _knob(self) -> str:
        return "latency_s" if self.fault.kind is FaultKind.SLOW_GENERATION else self.fault.kind.value

    @property
    def _value(self) -> bool | float:
        return round(2.0 + 4.0 * self.fault.variant, 2) if self.fault.kind is FaultKind.SLOW_GENERATION else True

    def _told(self) -> int:
        try:
            return (self.orders / f"{self.process.pid}.felt").read_text().split().count(self._knob)
        except FileNotFoundError:
            return 0
