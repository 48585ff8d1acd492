"""Points that end out of order and late reach the real trackers, and are read back with their own readers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eval_service.contract.states import PointState
from eval_service.contract.wire import Metric
from eval_service.trackers.config import TrackerConfig
from tests.support.couriers import tell
from tests.support.ledger import Ledger, result

pytestmark = pytest.mark.real
KEY = "eval/main/letters/exact"
READ_TENSORBOARD = """
import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(sys.argv[1]).Reload()
print(sorted((one.step, round(one.value, 3)) for one in read.Scalars(sys.argv[2])))
print(sorted((one.step, one.value) for one in read.Scalars("eval/skipped_unhealthy")))
"""
READ_MLFLOW = """
import sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
experiment = client.get_experiment_by_name("curves").experiment_id
run, = client.search_runs([experiment])
print(run.data.tags["evalfleet.run"])
print(sorted((one.step, round(one.value, 3)) for one in client.get_metric_history(run.info.run_id, sys.argv[2])))
"""
READ_WANDB = """
import json, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2
found, axes = [], set()

def records(data):
    # LevelDB's log: 7 bytes, then blocks of 32 KiB with chunks of crc, length, type (1 full, 4 last) and data.
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""

for path in sorted(Path(sys.argv[1]).rglob("*.wandb")):
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "metric" and record.metric.step_metric:
            axes.add((record.metric.glob_name or record.metric.name, record.metric.step_metric))
        if record.WhichOneof("record_type") == "history":
            row = {(one.key or "/".join(one.nested_key)): json.loads(one.value_json) for one in record.history.item}
            if sys.argv[2] in row:
                found.append((row["eval/step"], round(row[sys.argv[2]], 3)))
print(found)
print(("eval/*", "eval/step") in axes or sorted(axes))
"""
TRAINER_LOGS_50 = """
import sys, wandb
from eval_service.trackers.sinks.to_wandb import log_point
run = wandb.init(mode="offline", dir=sys.argv[1], project="p", settings=wandb.Settings(console="off", silent=True))
for step in range(0, 51, 10):
    run.log({"loss": 1.0}, step=step)
log_point(run, {"scalars": {sys.argv[2]: 0.25}, "point": {"step": 10}})
run.finish()
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Step 50 ends first, then 10; 30 is skipped."""
    made = Ledger(tmp_path)
    for step, value in ((50, 0.75), (10, 0.25)):
        point = made.queued(step)
        made.go(point, PointState.SCORING)
        metrics = {"letters/exact": Metric(value=value, stderr=0.1, n=4)}
        assert made.moves.finish(point, result(metrics=metrics, score=value))
        made.clock.turn(5)
    made.reach(PointState.SKIPPED, 30)
    return made


def read(program: str, *arguments: str) -> list[str]:
    """What a reader prints, in a process of its own: libraries have warnings and threads of theirs."""
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=100).stdout.splitlines()


def test_tensorboard_files_have_every_point_at_its_step(ledger: Ledger, tmp_path: Path) -> None:
    tell(ledger, "tensorboard", TrackerConfig(kind="tensorboard", path=tmp_path / "tb"), tmp_path)
    assert read(READ_TENSORBOARD, str(tmp_path / "tb/r1"), KEY) == ["[(10, 0.25), (50, 0.75)]", "[(30, 1.0)]"]


def test_mlflow_has_every_point_at_its_step_in_one_run(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    url = f"file:{tmp_path / 'mlruns'}"  # its SQL store needs the whole of mlflow, and not only its client
    tell(ledger, "mlflow", TrackerConfig(kind="mlflow", url=url, project="curves"), tmp_path)
    assert read(READ_MLFLOW, url, KEY) == ["r1", "[(10, 0.25), (50, 0.75)]"]


def test_wandb_offline_files_have_every_point_on_an_axis_of_their_own(ledger: Ledger, tmp_path: Path) -> None:
    tell(ledger, "wandb", TrackerConfig(kind="wandb", offline=True), tmp_path)
    assert read(READ_WANDB, str(tmp_path / "wandb"), KEY) == ["[(50, 0.75), (10, 0.25)]", "True"]


def test_late_eval_metrics_are_not_dropped_where_the_step_is_below_the_current_one(tmp_path: Path) -> None:
    """Step 10 ends after the trainer logged 50 to the same W&B run; its value is there at x = 10."""
    read(TRAINER_LOGS_50, str(tmp_path), KEY)
    assert read(READ_WANDB, str(tmp_path), KEY) == ["[(10, 0.25)]", "True"]
