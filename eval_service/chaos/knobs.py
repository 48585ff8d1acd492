"""A fault's knob at one fake engine, turned by files (engine/fake.py): on for so many times, told each time, or off."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from eval_service.chaos.faults import Fault, FaultKind
from eval_service.chaos.victims import alive


@dataclass(slots=True, eq=False)
class Knob:
    """What one engine is ordered; a server that is started anew has not heard of it."""

    orders: Path
    process: psutil.Process
    fault: Fault
    _before: int = field(init=False)
    _off: Path | None = None

    def __post_init__(self) -> None:
        self._before = self._told()

    def on(self) -> None:
        """Order it."""
        self._write("1-on", self.fault.times)

    def off(self) -> None:
        """Take it back, in a file of its own that is read after the other, so that neither replaces one unread."""
        self._off = self._write("2-off", 0)

    def bitten(self) -> bool:
        """Whether it was felt."""
        return self._told() > self._before

    def over(self) -> bool:
        """Whether it can't be felt any more."""
        taken_back = self._off is not None and not self._off.exists()
        return taken_back or self._told() >= self._before + self.fault.times or not alive(self.process)

    def _write(self, name: str, times: int) -> Path:
        path = self.orders / f"{self.process.pid}-{self.fault.number}-{name}.json"
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
