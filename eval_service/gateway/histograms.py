"""How long points took, as histograms: read off the ledger once at the first scrape, and then only what is new."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from eval_service.ledger.metering import Meters

SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)
STEPS = (0.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)
_FORGET_S = 120.0  # more than a reader looks back
# Metric, unit's name in the ledger, what it is, buckets.
FAMILIES = (
    ("evalfleet_point_queue_seconds", "queue_s", "From queued to the last attempt", SECONDS),
    ("evalfleet_point_pin_seconds", "pin_s", "Loading and proving a snapshot", SECONDS),
    ("evalfleet_point_generate_seconds", "generate_s", "Generating a point's samples", SECONDS),
    ("evalfleet_point_score_seconds", "score_s", "Scoring a point's samples and writing them", SECONDS),
    ("evalfleet_point_duration_seconds", "duration_s", "From queued to the result", SECONDS),
    ("evalfleet_point_export_seconds", "export_s", "What the trainer took to export a snapshot", SECONDS),
    ("evalfleet_point_stall_seconds", "stall_s", "What training waited for evaluation", SECONDS),
    ("evalfleet_point_lag_steps", "lag_steps", "Steps that the trainer was ahead when a point ended", STEPS),
)


@dataclass(slots=True)
class _Histogram:
    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        place = next((at for at, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))
        self.counts[place] += 1
        self.total += value

    def cumulated(self) -> list[tuple[str, float]]:
        found, so_far = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            so_far += count
            found.append(("+Inf" if bound == float("inf") else str(bound), float(so_far)))
        return found


class Histograms:
    """Of points that are done; a point is counted once, however often it is looked at."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._lock = threading.Lock()
        self._since = 0.0
        self._recent: dict[str, float] = {}
        self._by_run: dict[tuple[str, str], _Histogram] = {}

    def families(self) -> Iterator[Metric]:
        """Counted up to now."""
        with self._lock:
            self._read()
            for name, key, help_, _ in FAMILIES:
                family = HistogramMetricFamily(name, help_, labels=["run"])
                for (run, of), histogram in self._by_run.items():
                    if of == key:
                        family.add_metric([run], histogram.cumulated(), histogram.total)
                yield family

    def _read(self) -> None:
        for spent in self._meters.spent_since(self._since):
            if spent.point in self._recent:
                continue
            self._recent[spent.point] = spent.ended_at
            self._since = max(self._since, spent.ended_at)
            for _, key, _, bounds in FAMILIES:
                if (value := spent.timings.get(key)) is not None:
                    self._by_run.setdefault((spent.run, key), _Histogram(bounds)).add(float(value))
        self._recent = {point: at for point, at in self._recent.items() if at >= self._since - _FORGET_S}
