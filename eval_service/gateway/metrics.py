"""`/metrics`: made from the ledger at each scrape, so that every gateway replica tells the same."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from eval_service.contract.wire import FleetView, StatusView
from eval_service.gateway.histograms import Histograms
from eval_service.ledger.deliveries import Deliveries
from eval_service.ledger.metering import Meters
from eval_service.ledger.views import Views


class Metrics:
    """Made from the ledger, and of nothing else."""

    def __init__(self, views: Views) -> None:
        self._views = views
        self._meters = Meters(views.database)
        self._deliveries = Deliveries(views.database)
        self._histograms = Histograms(self._meters)

    def render(self) -> tuple[bytes, str]:
        """The text and its content type."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_LedgerCollector(self._views, self._meters, self._deliveries, self._histograms))
        return generate_latest(registry), CONTENT_TYPE_LATEST


class _LedgerCollector(Collector):
    def __init__(self, views: Views, meters: Meters, deliveries: Deliveries, histograms: Histograms) -> None:
        self._views = views
        self._meters = meters
        self._deliveries = deliveries
        self._histograms = histograms

    def collect(self) -> Iterator[Metric]:
        status, fleet = self._views.status(), self._views.fleet()
        yield _points(status)
        yield _reasons(self._views)
        yield _engines(fleet)
        yield _desired(fleet)
        yield _in_flight(fleet)
        yield _tokens(fleet)
        yield from _pool(fleet)
        yield GaugeMetricFamily("evalfleet_epoch", "Epoch of the controller", value=status.epoch)
        yield GaugeMetricFamily(
            "evalfleet_controller_alive", "Whether a controller acts", value=float(status.controller_alive)
        )
        yield from _health(fleet, self._meters.now)
        yield from _work(self._meters)
        yield _lags(self._meters)
        yield from self._histograms.families()
        yield from _collected(self._meters)
        yield from _deliveries(self._deliveries, self._meters.now)


def _points(status: StatusView) -> Metric:
    family = GaugeMetricFamily("evalfleet_points", "Points by run and state", labels=["run", "state"])
    for run, states in status.runs.items():
        for state, count in states.items():
            family.add_metric([run, state], count)
    return family


def _reasons(views: Views) -> Metric:
    family = GaugeMetricFamily(
        "evalfleet_points_without_result", "Ended points that have no result", labels=["run", "state", "reason"]
    )
    for (run, state, reason), count in views.reasons().items():
        family.add_metric([run, state, reason], count)
    return family


def _engines(fleet: FleetView) -> Metric:
    family = GaugeMetricFamily("evalfleet_engines", "Engines by group and state", labels=["group", "state"])
    for group in fleet.groups:
        counts: dict[str, int] = {}
        for engine in group.engines:
            counts[engine.state] = counts.get(engine.state, 0) + 1
        for state, count in counts.items():
            family.add_metric([group.name, state], count)
    return family


def _desired(fleet: FleetView) -> Metric:
    family = GaugeMetricFamily("evalfleet_engines_desired", "Engines that a group should have", labels=["group"])
    for group in fleet.groups:
        family.add_metric([group.name], group.desired)
    return family


def _in_flight(fleet: FleetView) -> Metric:
    family = GaugeMetricFamily("evalfleet_engine_in_flight", "Requests in flight", labels=["group", "engine"])
    for group in fleet.groups:
        for engine in group.engines:
            family.add_metric([group.name, engine.id], engine.in_flight)
    return family


def _tokens(fleet: FleetView) -> Metric:
    text = "Output tokens per second of an engine's answers to the service, over the last 10 s"
    family = GaugeMetricFamily("evalfleet_engine_tokens_per_second", text, labels=["group", "engine"])
    for group in fleet.groups:
        for engine in group.engines:
            family.add_metric([group.name, engine.id], engine.tokens_per_s)
    return family


def _pool(fleet: FleetView) -> Iterator[Metric]:
    told = {
        "capacity": "Requests to engines that may be in flight over all lanes",
        "in_flight": "Requests to engines in flight over all lanes",
        "waiting": "Requests to engines that wait for room",
    }
    for name, text in told.items():
        yield GaugeMetricFamily(f"evalfleet_pool_{name}", text, value=getattr(fleet.pool, name))


def _health(fleet: FleetView, now: float) -> Iterator[Metric]:
    ready = GaugeMetricFamily("evalfleet_engines_ready", "Engines that can be pinned or asked", labels=["group"])
    restarts = GaugeMetricFamily(
        "evalfleet_engine_restarts", "Restarts of an engine's server in its replica", labels=["group", "engine"]
    )
    silent = GaugeMetricFamily(
        "evalfleet_engine_silent_seconds",
        "Since an engine was last heard of; a few seconds where no point has it",
        labels=["group", "engine"],
    )
    for group in fleet.groups:
        ready.add_metric([group.name], group.ready)
        for engine in group.engines:
            restarts.add_metric([group.name, engine.id], engine.restarts)
            silent.add_metric([group.name, engine.id], max(now - engine.heard_at, 0.0))
    yield from (ready, restarts, silent)


def _work(meters: Meters) -> Iterator[Metric]:
    told = {
        "evalfleet_queue_oldest_seconds": ("How long the first in the queue has waited", meters.oldest_queued_s()),
        "evalfleet_drains_open": ("Drains that wait", meters.open_drains()),
    }
    for name, (help_, value) in told.items():
        yield GaugeMetricFamily(name, help_, value=float(value))


def _lags(meters: Meters) -> Metric:
    family = GaugeMetricFamily(
        "evalfleet_lag_steps", "Steps that the trainer was ahead when the run's last point ended", labels=["run"]
    )
    for run, lag in meters.lags().items():
        family.add_metric([run], lag)
    return family


def _collected(meters: Meters) -> Iterator[Metric]:
    counts = meters.collected()
    yield CounterMetricFamily(
        "evalfleet_gc_snapshots", "Snapshots that garbage collection deleted", value=counts["snapshots"]
    )
    yield CounterMetricFamily(
        "evalfleet_gc_bytes", "Bytes of the snapshots that garbage collection deleted", value=counts["bytes"]
    )


def _deliveries(deliveries: Deliveries, now: float) -> Iterator[Metric]:
    told = CounterMetricFamily("evalfleet_deliveries", "Events told to trackers, webhooks, traces", labels=["target"])
    failures = CounterMetricFamily("evalfleet_delivery_failures", "Tries that failed; repeated", labels=["target"])
    refused = CounterMetricFamily("evalfleet_deliveries_refused", "What one will never take", labels=["target"])
    waiting = GaugeMetricFamily("evalfleet_deliveries_waiting", "What waits for its next try", labels=["target"])
    oldest = GaugeMetricFamily("evalfleet_delivery_oldest_seconds", "How long the oldest waits", labels=["target"])
    for state in deliveries.states():
        told.add_metric([state.name], state.delivered)
        failures.add_metric([state.name], state.failures)
        refused.add_metric([state.name], state.refused)
        waiting.add_metric([state.name], state.waiting)
        oldest.add_metric([state.name], max(now - state.oldest_at, 0.0) if state.oldest_at is not None else 0.0)
    yield from (told, failures, refused, waiting, oldest)
