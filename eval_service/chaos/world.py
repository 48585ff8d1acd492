"""Where a chaos run lies, and what is in it: the fleet of fakes, the suites, the base model.

Invariant: nothing is ever deleted but in a directory that carries our marker.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from eval_service.chaos.snapshots import write_base
from eval_service.contract import names
from eval_service.contract.errors import ConfigError
from eval_service.contract.wire import Overflow, RunSpec

MARKER = ".evalfleet-chaos"
SUITES = {"main": 48, "side": 12}  # prompts of each
RUNS = ("alpha", "beta", "gamma")
_OVERFLOW = {"alpha": Overflow.BACKPRESSURE, "beta": Overflow.LATEST, "gamma": Overflow.BACKPRESSURE}
_KEEP = {"alpha": 2, "beta": 0, "gamma": 1}
RESERVATION_TIMEOUT_S = 12.0
VISIBILITY_TIMEOUT_S = 8.0
SAMPLE_TIMEOUT_S = 4.0


@dataclass(frozen=True, slots=True)
class World:
    """The places; `out` is absolute."""

    out: Path

    @property
    def root(self) -> Path:
        """The root of every run."""
        return self.out / "runs"

    @property
    def model(self) -> Path:
        """The base model."""
        return self.out / "model"

    @property
    def state(self) -> Path:
        """The service's state directory."""
        return self.out / "state"

    @property
    def ledger(self) -> Path:
        """The ledger's file."""
        return self.state / "ledger.db"

    @property
    def lock(self) -> Path:
        """The controller's lock."""
        return self.state / "ledger.db.lock"

    @property
    def orders(self) -> Path:
        """Where fake engines look for knobs to turn."""
        return self.out / "orders"

    @property
    def hidden(self) -> Path:
        """Where files are that the slow file system does not show."""
        return self.out / "hidden"

    @property
    def logs(self) -> Path:
        """What child processes print."""
        return self.out / "logs"

    @property
    def stop(self) -> Path:
        """Its presence tells the trainers to come to their end."""
        return self.out / "stop"

    @property
    def prompts(self) -> Path:
        """Every prompt with its answer."""
        return self.out / "prompts.jsonl"

    def diary(self, run: str) -> Path:
        """A trainer's diary."""
        return self.out / f"trainer-{run}.jsonl"

    def trainer_spec(self, run: str) -> Path:
        """What a trainer is told."""
        return self.out / f"trainer-{run}.json"

    def run_spec(self, run: str) -> RunSpec:
        """What the service is told of a run."""
        return RunSpec(
            root=str(self.root),
            suites=tuple(SUITES),
            overflow=_OVERFLOW.get(run, Overflow.BACKPRESSURE),
            max_in_flight=2,
            keep=_KEEP.get(run, 2),
        )

    def run_dir(self, run: str) -> Path:
        """A run's own directory."""
        return names.run_dir(self.root, run)


def build(out: Path, *, engines: int) -> World:
    """An empty world; a former one's leavings there are removed.

    Raises:
        ConfigError: the directory holds something that no chaos run wrote.
    """
    out = out.resolve()
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is not a directory", field="--out", hint="name a directory")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
        raise ConfigError(f"{out} holds files that no chaos run wrote", field="--out", hint="name an empty directory")
    shutil.rmtree(out, ignore_errors=True)
    world = World(out)
    for directory in (out, world.root, world.orders, world.hidden, world.logs):
        directory.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()
    write_base(world.model)
    everything = []
    for suite, count in SUITES.items():
        rows = [{"prompt": f"{suite} {number}?", "answer": f"{suite[0]}{number}"} for number in range(count)]
        (out / f"{suite}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        everything += rows
    world.prompts.write_text("".join(json.dumps(row) + "\n" for row in everything))
    (out / "suites.toml").write_text("".join(_SUITE.format(name=suite) for suite in SUITES))
    (out / "fleet.toml").write_text(
        _FLEET.format(
            engines=engines,
            orders=json.dumps(str(world.orders)),
            reservation=RESERVATION_TIMEOUT_S,
            visibility=VISIBILITY_TIMEOUT_S,
            sample=SAMPLE_TIMEOUT_S,
        )
    )
    return world


def known_prompts(world: World) -> list[str]:
    """Every prompt of the suites."""
    return [json.loads(line)["prompt"] for line in world.prompts.read_text().splitlines()]


_SUITE = """
[suites.{name}]
sampling = {{ max_new_tokens = 8 }}
datasets = [{{ name = "{name}", path = "{name}.jsonl" }}]
"""

# Every limit is short, so that minutes show what else takes days; but a point's own is no fault's to reach. Whether
# points get done is seen at the end, when the runs have to drain.
_FLEET = """
[service]
roots = ["runs", "model"]
state_dir = "state"
scan_interval_s = 2.0
visibility_timeout_s = {visibility}
reservation_timeout_s = {reservation}
leftover_idle_s = 5.0
controller_grace_s = 10.0
proxy_port = 0
point_timeout_s = 3600.0
pin_timeout_s = 10.0
sample_timeout_s = {sample}
max_attempts = 25
engine_lost_s = 4.0

[groups.eval]
grade = "fake"
model = "model"
num_engines = {engines}
num_gpus_per_engine = 0
server_concurrency = 8
start_timeout_s = 60.0
overrides = {{ latency_s = 0.08, orders = {orders} }}
"""
