"""MLflow: one run a training run, found again by its tag; metrics at the point's step and the time of its end.

A metric that is logged again with the same step, time and value is the same metric to a tracking server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from eval_service.trackers.told import Item

TAG = "evalfleet.run"
_PAGE = 1000  # that a server takes at once


class Sink:
    """Logs metrics."""

    def __init__(self, config: Mapping[str, Any], state_dir: str) -> None:
        del state_dir
        if config["api_key_env"]:
            os.environ["MLFLOW_TRACKING_TOKEN"] = os.environ[config["api_key_env"]]
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # whoever started this tries again
        self._client = MlflowClient(tracking_uri=config["url"])
        self._project = config["project"]
        self._runs: dict[str, str] = {}

    def write(self, item: Item) -> None:
        """A point's scalars."""
        run, at_ms, step = self._run(item["run"]), int(item["at"] * 1000), item["point"]["step"]
        metrics = [Metric(spelled(key), value, at_ms, step) for key, value in item["scalars"].items()]
        for start in range(0, len(metrics), _PAGE):
            try:
                self._client.log_batch(run, metrics=metrics[start : start + _PAGE])
            except MlflowException:
                self._runs.clear()  # it may have been deleted there
                raise

    def flush(self) -> None:
        """Nothing is held back."""

    def _run(self, run: str) -> str:
        if run not in self._runs:
            experiment = self._experiment()
            known = self._client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{run}'", max_results=1)
            tags = {TAG: run, "mlflow.runName": run}
            self._runs[run] = next(_ids(known), None) or self._client.create_run(experiment, tags=tags).info.run_id
        return self._runs[run]

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._project)
        return str(found.experiment_id if found is not None else self._client.create_experiment(self._project))


def spelled(key: str) -> str:
    """A key with what MLflow takes: letters, digits and `_-. /:`; `pass@k` is `pass_at_k` and `pass^k` `pass_all_k`."""
    return re.sub(r"[^\w\-. /:]", "_", key.replace("@", "_at_").replace("^", "_all_"))


def _ids(known: Any) -> Iterator[str]:
    return (found.info.run_id for found in known)
