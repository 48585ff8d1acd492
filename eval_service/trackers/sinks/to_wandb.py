"""Weights & Biases: one run of ours for each training run, in its group, with an x-axis of its own, `eval/step`.

W&B drops what is logged at a step below one that it has seen. So nothing is logged at W&B's own step: the point's is a
value beside the others, and the axis of them all. A run is finished after each delivery, since only then is it known to
have arrived, and taken up again with the next one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import wandb

from eval_service.trackers.told import Item

STEP = "eval/step"


class Sink:
    """Logs to one run at a time."""

    def __init__(self, config: Mapping[str, Any], state_dir: str) -> None:
        self._config = config
        if config["api_key_env"] and not config["offline"]:
            os.environ["WANDB_API_KEY"] = os.environ[config["api_key_env"]]
        if config["url"]:
            os.environ["WANDB_BASE_URL"] = config["url"]
        self._directory = os.path.join(state_dir, "wandb")
        self._run: Any = None
        self._of: str | None = None

    def write(self, item: Item) -> None:
        """A point's scalars, at its step."""
        if self._of != item["run"]:
            self.flush()
            self._run, self._of = self._open(item["run"]), item["run"]
        log_point(self._run, item)

    def flush(self) -> None:
        """Finish the run: it is sent, or on the disk, when this returns."""
        run, self._run, self._of = self._run, None, None
        if run is not None:
            run.finish()

    def _open(self, run: str) -> Any:
        os.makedirs(self._directory, exist_ok=True)
        return wandb.init(
            project=self._config["project"],
            entity=self._config["entity"],
            id=f"evalfleet-{run}",
            name=f"{run}-eval",
            group=run,
            job_type="eval",
            resume="allow",
            mode="offline" if self._config["offline"] else "online",
            dir=self._directory,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
        )


def log_point(run: Any, item: Item) -> None:
    """Log to an open run, whatever its own step is by now."""
    run.define_metric(STEP)
    run.define_metric("eval/*", step_metric=STEP)
    run.log({**item["scalars"], STEP: item["point"]["step"]})
