"""All couriers of a service, one for each tracker, each webhook and the traces."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

from eval_service.contract.errors import ConfigError
from eval_service.fleet_config import FleetConfig
from eval_service.ledger.database import Database
from eval_service.ledger.deliveries import Deliveries
from eval_service.trackers.config import TRACES, Target, TrackerConfig, secret_names
from eval_service.trackers.courier import Courier
from eval_service.trackers.process import Worker

_LIBRARIES = {
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "traces": "opentelemetry.exporter.otlp.proto.http",
}


class Bureau:
    """Starts and ends them."""

    def __init__(self, fleet: FleetConfig, database: Database) -> None:
        self._deliveries = Deliveries(database)
        state_dir = fleet.service.state_dir
        self._couriers = [
            Courier(
                name,
                target,
                self._deliveries,
                Worker(
                    kind,
                    target,
                    state_dir=state_dir,
                    log=state_dir / "logs" / f"{name.replace(':', '-')}.log",
                    networks=fleet.service.webhook_networks,
                ),
            )
            for name, kind, target in targets(fleet)
        ]

    def start(self) -> None:
        """Begin where each of them left off."""
        self._deliveries.keep_only([courier.name for courier in self._couriers])
        for courier in self._couriers:
            courier.start()

    def stuck(self) -> list[str]:
        """The names of those that make no progress."""
        return [courier.name for courier in self._couriers if not courier.alive()]

    def close(self) -> None:
        """End all of them."""
        for courier in self._couriers:
            courier.close()


def targets(fleet: FleetConfig) -> Iterator[tuple[str, str, Target]]:
    """Names (as the ledger and the metrics have them), kinds and configs."""
    for name, tracker in fleet.trackers.items():
        yield f"tracker:{name}", tracker.kind, tracker
    for name, hook in fleet.webhooks.items():
        yield f"webhook:{name}", "webhook", hook
    if fleet.traces is not None:
        yield TRACES, "traces", fleet.traces


def check_targets(fleet: FleetConfig, environment: Mapping[str, str]) -> None:
    """See that libraries and secrets are there, before anything starts.

    Raises:
        ConfigError: names what is missing.
    """
    for name, kind, target in targets(fleet):
        field = name.replace(":", "s.")
        for variable in secret_names(target):
            if not environment.get(variable) and not (isinstance(target, TrackerConfig) and target.offline):
                hint = "it is to hold the secret; fleet.toml names the variable only"
                raise ConfigError(f"the environment variable {variable} is not set", field=field, hint=hint)
        if (library := _LIBRARIES.get(kind)) is not None and not _there(library):
            hint = f"pip install 'evalfleet[{kind}]'"
            raise ConfigError(f"{kind} needs {library}, which is not installed", field=field, hint=hint)


def _there(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        return False
