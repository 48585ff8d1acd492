"""`/metrics`: made from the ledger at each scrape, so that every gateway replica tells the same."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from eval_service.contract.wire import FleetView, StatusView
from eval_service.ledger.views import Views


class _LedgerCollector(Collector):
    def __init__(self, views: Views) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        status, fleet = self._views.status(), self._views.fleet()
        yield _points(status)
        yield _reasons(self._views)
        yield _engines(fleet)
        yield _desired(fleet)
        yield _in_flight(fleet)
        yield from _pool(fleet)
        yield GaugeMetricFamily("evalfleet_epoch", "Epoch of the controller", value=status.epoch)
        yield GaugeMetricFamily(
            "evalfleet_controller_alive", "Whether a controller acts", value=float(status.controller_alive)
        )


def render(views: Views) -> tuple[bytes, str]:
    """The text and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_LedgerCollector(views))
    return generate_latest(registry), CONTENT_TYPE_LATEST


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


def _pool(fleet: FleetView) -> Iterator[Metric]:
    told = {
        "capacity": "Requests to engines that may be in flight over all lanes",
        "in_flight": "Requests to engines in flight over all lanes",
        "waiting": "Requests to engines that wait for room",
    }
    for name, text in told.items():
        yield GaugeMetricFamily(f"evalfleet_pool_{name}", text, value=getattr(fleet.pool, name))
