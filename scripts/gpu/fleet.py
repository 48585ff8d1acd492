"""A training and its fleet on one host of any size: what evaluation costs, what the fleet does, what a fault costs.

    PYTHONPATH=OVERLAY python3 scripts/gpu/fleet.py --size cpu|1|2|4|8 --out DIR [--only PARTS] [--budget-s S] [--tiny]

| size | ranks of the trainer | engines | parts |
| --- | --- | --- | --- |
| cpu | 2 (gloo, tensor 2) | 2 | alone, throughput, fleet |
| 1 | 1 | 1, on the trainer's GPU | alone, torn, fleet |
| 2 | 1 | 1 | alone, steps, points, torn, tp |
| 4 | 2 (tensor 2) | 2 | alone, throughput, fleet |
| 8 | 4 (tensor 2 x data 2) | 4 | alone, throughput, fleet |

- `alone`: the training with no evaluation, before anything else of ours runs on the host.
- `steps`: the training of `alone`, evaluated: the mean step against alone's.
- `points`: `evalfleet launch` lays out a service of its own and a training with exactly three points, checked by
  `evalfleet check --expect-points 3`.
- `throughput`: the same requests to one engine alone, then N times as many to all.
- `fleet`: the training evaluated every few steps, while an engine is killed and the fleet scaled down and up.
- `torn`: snapshots written while steps go on against those of the same steps for which training waited, bit by bit.
- `tp`: two ranks against one, the fleet off: losses, and the exports of untrained and of trained weights.

What was found is written to `<out>/fleet-<size>.json` after each part, so a run that is cut leaves its figures. A part
that would not fit into what is left of the budget is left out, and listed. `--tiny` takes a tiny model and CPU engines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu.figures import (
    looks_figures,
    loss_figures,
    point_figures,
    speed_figures,
    step_figures,
    verdicts,
)
from scripts.gpu.inputs import build_apart
from scripts.gpu.processes import (
    Clock,
    Process,
    engine_log,
    engines,
    environment,
    free_port,
    say,
    versions,
    wait_for_engines,
)

Found = dict[str, Any]
FLEET_PARTS = ("alone", "throughput", "fleet")
SIZES: dict[str, Found] = {
    "cpu": {"tensor": 2, "data": 1, "engines": 2, "parts": FLEET_PARTS},
    "1": {"tensor": 1, "data": 1, "engines": 1, "shared": True, "parts": ("alone", "torn", "fleet")},
    "2": {"tensor": 1, "data": 1, "engines": 1, "parts": ("alone", "steps", "points", "torn", "tp")},
    "4": {"tensor": 2, "data": 1, "engines": 2, "parts": FLEET_PARTS},
    "8": {"tensor": 2, "data": 2, "engines": 4, "parts": FLEET_PARTS},
}
FULL: Found = {
    "shape": "qwen3-0.6b",
    "num_steps": 40,  # an epoch, half of `points`: a short file, since each training tokenizes all of it
    # For each tensor-parallel rank, about 20,000 tokens. With a quarter of it a step waits for Python, which launches
    # kernels slower the more of the host's cores are busy: it would be the host that is measured.
    "batch": 512,
    "lr": 3e-4,
    "warmup": 10,
    "examples": 2048,  # for each engine: a point takes about as long as the next one is away
    "points": 2,
    "buffer": "device",
    "keep": 3,
    "load": 3072,
    "load_tokens": 128,
    "alone_steps": 120,  # of `alone`
    "steps_steps": 200,  # of `steps`, and of the `alone` that it is held against
    "export_every": 40,  # of `steps`; epochs end at multiples of it, as an epoch's end is a point too
    "tp_steps": 20,
    "torn_every": 15,
    "fleet_s": 120.0,  # how long the training of `fleet` is to take, and how often it has a point
    "point_every_s": 5.0,
    "launch_s": 60.0,  # of a training, beside its steps
}
TINY: Found = FULL | {
    "shape": "tiny",
    "num_steps": 40,
    "batch": 32,
    "lr": 2e-3,
    "warmup": 5,
    "examples": 96,
    "buffer": "host",
    "load": 256,
    "load_tokens": 32,
    "concurrency": 16,
    "alone_steps": 120,
    "steps_steps": 120,
    "export_every": 20,
    "tp_steps": 5,
    "torn_every": 10,
    "fleet_s": 60.0,
    "point_every_s": 4.0,
    "launch_s": 30.0,
}


@dataclass
class Measurement:
    """One call of the script: where it works, what it found, and the service while there is one."""

    args: argparse.Namespace
    plan: Found
    parts: list[str]
    work: Path
    clock: Clock
    port: int = field(default_factory=free_port)
    found: Found = field(default_factory=dict)
    service: Process | None = None
    client: Any = None

    @property
    def ranks(self) -> int:
        """Of the trainer."""
        return int(self.plan["tensor"] * self.plan["data"])

    def engines_gpus(self) -> dict[str, str]:
        """The environment of the service."""
        return self.gpus(0 if self.plan["shared"] else self.ranks, self.plan["engines"])

    def gpus(self, first: int, count: int) -> dict[str, str]:
        """The environment of what is to see so many of the GPUs that this process sees."""
        if self.args.tiny:
            return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        all_of_them = visible.split(",") if visible else [str(number) for number in range(first + count)]
        chosen = all_of_them[first : first + count]
        if len(chosen) < count:
            raise RuntimeError(f"{first + count} GPUs are needed, and {len(all_of_them)} are visible")
        return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}

    def files(self) -> list[str]:
        """The service's."""
        return ["--fleet", str(self.work / "fleet.toml"), "--suites", str(self.work / "suites.toml")]

    def keep(self) -> None:
        """Write what was found so far."""
        self.found["verdicts"] = verdicts(self.found)
        self.args.out.mkdir(parents=True, exist_ok=True)
        (self.args.out / f"fleet-{self.args.size}.json").write_text(json.dumps(self.found, indent=1))


# --- the service and the trainer


def start_service(run: Measurement, engines_at_least: int = 1) -> None:
    """Start it, with its first engine; the others follow once that one has built what all of them need."""
    if engines_at_least == 0:
        fleet = run.work / "fleet.toml"
        fleet.write_text(fleet.read_text().replace("num_engines = [1,", "num_engines = [0,"))
    run.service = Process(
        ["-m", "eval_service.cli.main", "serve", *run.files()],
        run.work / "logs" / "service.log",
        cwd=run.work,
        **run.engines_gpus(),
    )
    run.found.setdefault("service", {})["started_at"] = time.time()


def connect(run: Measurement, timeout_s: float) -> Any:
    """Wait until the service answers for good."""
    from eval_service.contract.client import EvalClient

    client = EvalClient(f"http://127.0.0.1:{run.port}")
    wait_until(lambda: client.ready().ok, run.clock.left(timeout_s))
    run.client = client
    return client


def need_engines(run: Measurement) -> None:
    """Wait until all engines are there, which is done once."""
    if run.client is not None:
        return
    if run.service is None:
        start_service(run)
    assert run.service is not None
    client, about, count = connect(run, 120.0), run.found["service"], run.plan["engines"]
    wait_for_engines(client, run.service, 1, run.clock.left(330.0))
    about["first_engine_s"] = time.time() - about["started_at"]
    say(f"the first engine is there after {about['first_engine_s']:.0f} s")
    if count > 1:
        began = time.time()
        client.scale("eval", count)
        wait_for_engines(client, run.service, count, run.clock.left(200.0))
        about["other_engines_s"] = time.time() - began
        say(f"{count} engines are there after {about['other_engines_s']:.0f} s more")


def stop_service(run: Measurement) -> None:
    """End it; what it said last is kept."""
    if run.service is None:
        return
    if run.client is not None:
        run.client.close()
    run.found["service"] |= {"log": run.service.tail(2000), "engine_log": engine_log(run.work)}
    run.service.end(patience_s=30.0)
    run.service = run.client = None


def start_training(run: Measurement, name: str, ranks: int, *settings: str) -> Process:
    """A training of its own name, with settings over run.toml's."""
    own = (f"run.name={name}", f"run.output_dir={run.work / name}")
    argv = ["-m", "trainer.main", "--config", str(run.work / "run.toml")]
    argv += [part for setting in (*own, *settings) for part in ("--set", setting)]
    if ranks > 1:
        where = ["--nnodes", "1", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1"]
        argv = ["-m", "torch.distributed.run", *where, "--master-port", str(free_port()), *argv]
    say(f"training {name}: {' '.join(settings)}")
    return Process(argv, run.work / "logs" / f"{name}.log", cwd=run.work, **run.gpus(0, ranks))


def end_training(run: Measurement, name: str, trainer: Process, timeout_s: float) -> Found:
    """Its end and its figures."""
    began = time.monotonic()
    code = trainer.wait(run.clock.left(timeout_s))
    figures = step_figures(step_log(run, name))
    said = {} if code == 0 else {"log": trainer.tail()}
    return {"exit_code": code, "waited_s": time.monotonic() - began, **figures, **said}


def step_log(run: Measurement, name: str) -> list[Found]:
    """Its events; a line that was cut is left out."""
    path, entries = run.work / name / "steps.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def train(run: Measurement, name: str, ranks: int, *settings: str) -> Found:
    """One training from its start to its end; its checkpoints, gigabytes of them, are not kept."""
    try:
        return end_training(run, name, start_training(run, name, ranks, *settings), 300.0)
    finally:
        shutil.rmtree(run.work / name / "checkpoints", ignore_errors=True)


def evaluated(run: Measurement, name: str, expected: int) -> Found:
    """What the service tells of a run that has ended."""
    points = [point.model_dump(mode="json") for point in run.client.points(run=name).points]
    command = ["-m", "eval_service.cli.main", "check", name, "--metric", "exact_match", "--threshold", "0.0"]
    command += ["--expect-points", str(expected), "--url", f"http://127.0.0.1:{run.port}"]
    check = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=run.work,
        timeout=run.clock.left(60.0),
        check=False,
    )
    receipt = run.work / name / "receipt.json"
    return {
        "expected_points": expected,
        **point_figures(points),
        "check": {"exit_code": check.returncode, "said": (check.stdout + check.stderr)[-1500:]},
        "receipt": json.loads(receipt.read_text()) if receipt.exists() else None,
    }


def against_alone(run: Measurement, found: Found) -> Found:
    """The mean and the median step, as parts of those of the training alone."""
    alone = run.found.get("alone") or {}
    ratios = {}
    for ratio, key in (("step_ratio", "step_s_mean"), ("step_ratio_of_medians", "step_s_median")):
        ratios[ratio] = found[key] / alone[key] if alone.get(key) and found.get(key) else None
    return found | ratios


def no_evaluation() -> tuple[str, ...]:
    """Settings of a training that is not evaluated."""
    return ("eval.interval=none", "eval.suites=[]", "eval.url=none")


# --- parts


def part_alone(run: Measurement) -> Found:
    steps = run.plan["steps_steps" if "steps" in run.parts else "alone_steps"]
    return train(run, "alone", run.ranks, *no_evaluation(), f"train.num_steps={steps}")


def part_points(run: Measurement) -> Found:
    """One command starts a service and the training, and ends both; a service without engines then tells of it."""
    stop_service(run)
    epoch = run.plan["num_steps"]
    command = ["-m", "eval_service.cli.main", "launch", "--config", str(run.work / "run.toml"), *run.files()]
    command += ["--port", str(run.port)]
    own = ("run.name=points", f"run.output_dir={run.work / 'points'}")
    for setting in (*own, f"train.num_steps={2 * epoch}", f"eval.interval={epoch}"):
        command += ["--set", setting]
    gpus = run.gpus(0, run.ranks + run.plan["engines"])
    began = time.time()
    launch = Process(command, run.work / "logs" / "launch.log", cwd=run.work, **gpus)
    try:
        found = end_training(run, "points", launch, 330.0) | {"launch_said": launch.tail(2500)}
    finally:
        launch.end(patience_s=60.0)
        shutil.rmtree(run.work / "points" / "checkpoints", ignore_errors=True)
    run.found["points"] = found = found | {"launch_s": time.time() - began}
    run.keep()
    start_service(run, engines_at_least=0)
    connect(run, 60.0)
    return found | evaluated(run, "points", 3)


def part_steps(run: Measurement) -> Found:
    need_engines(run)
    steps, every = run.plan["steps_steps"], run.plan["export_every"]
    found = train(run, "steps", run.ranks, f"train.num_steps={steps}", f"eval.interval={every}")
    return against_alone(run, found) | evaluated(run, "steps", 1 + math.ceil(steps / every))


def part_throughput(run: Measurement) -> Found:
    """Points of the base model, of a run that may have one engine, then all of them."""
    need_engines(run)
    count = run.plan["engines"]
    speeds: Found = {}
    for suite, most in (("load-one", 1), ("load-all", count)):
        speeds[suite] = load_point(run, suite, most)
    one, fleet = (speeds[suite].get("tokens_per_s") for suite in ("load-one", "load-all"))
    return {**speed_figures(one, fleet, count), "loads": speeds}


def load_point(run: Measurement, suite: str, most: int) -> Found:
    """Evaluate the base model on one of the load suites: tokens by engine, and seconds."""
    from uuid import uuid4

    from eval_service.contract.wire import DispatchRequest, RunSpec, Source

    client, name = run.client, f"load{most}-{suite}"
    client.put_run(name, RunSpec(root=str(run.work / "root"), suites=(suite,), max_engines=most))
    asked: Found = {"run": name, "step": 0, "suites": (suite,), "reservation": str(uuid4()), "source": Source.CALLER}
    reply = client.dispatch(DispatchRequest(**asked, snapshot=str(run.work / "model"), force=True))
    point = reply.points[0].id
    wait_until(lambda: client.point(point).state in ("done", "failed", "skipped", "cancelled"), run.clock.left(150.0))
    view = client.point(point)
    by_engine: dict[str, int] = {}
    seen = 0
    while seen < (page := client.samples(point, offset=seen, limit=5000)).total and page.samples:
        seen += len(page.samples)
        for sample in page.samples:
            by_engine[sample.engine] = by_engine.get(sample.engine, 0) + (sample.output_tokens or 0)
    seconds, tokens = view.timings.generate_s, sum(by_engine.values())
    told = {"state": str(view.state), "detail": view.detail, "samples": seen, "tokens": tokens, "generate_s": seconds}
    return told | {"by_engine": by_engine, "tokens_per_s": tokens / seconds if seconds else None}


def part_fleet(run: Measurement) -> Found:
    """The training of a fleet, long enough for what happens to it; ends with a drain."""
    need_engines(run)
    step_s = (run.found.get("alone") or {}).get("step_s_mean") or run.plan["fleet_s"] / run.plan["alone_steps"]
    every = max(2, round(run.plan["point_every_s"] / step_s))
    length_s = max(20.0, min(run.plan["fleet_s"], run.clock.left(1e9) - run.plan["launch_s"] - 60.0))
    every = min(every, run.plan["num_steps"])
    exports = max(4, int(length_s / step_s) // every)
    settings = [f"train.num_steps={every * exports}", f"eval.interval={every}", "eval.max_in_flight=32"]
    trainer = start_training(run, "fleet", run.ranks, *settings, f"data.train={an_epoch(run, every)}")
    happened: list[Found] = []
    with Looks(run.client) as looks:
        try:
            disturb(run, trainer, happened, length_s)
        except Exception:  # noqa: BLE001 - what did not happen is told; the training goes on
            happened.append({"what": "gave up", "detail": traceback.format_exc()[-1500:]})
        found = end_training(run, "fleet", trainer, length_s + run.plan["launch_s"] + 150.0)
    shutil.rmtree(run.work / "fleet" / "checkpoints", ignore_errors=True)
    found = against_alone(run, found) | evaluated(run, "fleet", 1 + exports)
    return found | {"interval": every, "happened": happened, "looks": looks_figures(looks.seen)}


def an_epoch(run: Measurement, steps: int) -> Path:
    """The data's beginning, so much that an epoch ends with each point."""
    path = run.work / "epoch.jsonl"
    lines = (run.work / "train.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: steps * run.plan["batch"]]))
    return path


def part_torn(run: Measurement) -> Found:
    """From either buffer."""
    need_engines(run)
    buffers = ("host",) if run.args.tiny else ("device", "host")
    return {buffer: torn_from(run, buffer) for buffer in buffers}


def torn_from(run: Measurement, buffer: str) -> Found:
    """Each point's export, written behind, and a `save_hf` directory of its step, of which no step could have part."""
    every, count, name = run.plan["torn_every"], 4, f"torn-{buffer}"
    settings = [f"train.num_steps={every * count + 1}", f"eval.interval={every}", "eval.keep=10", "train.save_hf=true"]
    settings += [f"train.save_interval={every}", "train.keep_checkpoints=1", "train.schedule=constant"]
    trainer = start_training(run, name, run.ranks, f"eval.buffer={buffer}", *settings)
    found = end_training(run, name, trainer, 300.0)
    checkpoints, root = run.work / name / "checkpoints", run.work / "root"
    saved, exported = digests(checkpoints / "hf" / name), digests(root / name)
    shutil.rmtree(checkpoints, ignore_errors=True)
    steps = sorted(saved.keys() & exported.keys())
    equal = {step: saved[step] == exported[step] for step in steps}
    different = len({exported[step] for step in steps})
    return found | {"planned": count + 1, "equal": equal, "different_weights": different}


def digests(place: Path) -> dict[int, str]:
    """Of the tensors' bytes, by step, of the snapshots in a directory."""
    from eval_service.contract.manifest import read_manifest

    manifests = [read_manifest(path) for path in place.glob("step_*")]
    return {manifest.step: manifest.tensor_digest for manifest in manifests}


# --- what happens to a fleet


def disturb(run: Measurement, trainer: Process, happened: list[Found], length_s: float) -> None:
    """Kill an engine, then scale down by one and up again, each while points run.

    The scaling waits for the killed engine to be back, but not so long that the training ends before it.
    """
    client, count = run.client, run.plan["engines"]
    wait_until(lambda: "step_begin" in {entry["event"] for entry in step_log(run, "fleet")}, run.clock.left(120.0))
    began = time.monotonic()

    def note(what: str, **about: Any) -> None:
        say(what)
        happened.append({"what": what, "at_s": time.monotonic() - began, **about})

    def soon() -> float:
        return run.clock.left(150.0) if trainer.process.poll() is None else 1.0

    def late() -> bool:
        return time.monotonic() - began > 0.6 * length_s or trainer.process.poll() is not None

    victim = wait_until(lambda: working(client), soon())
    os.kill(victim.server_pid, signal.SIGKILL)
    state = str(client.point(victim.point).state)
    note("killed", engine=victim.id, point=victim.point, in_flight=victim.in_flight, state_of_point=state)
    wait_until(lambda: ready(client) < count, soon())
    wait_until(lambda: ready(client) == count or late(), soon())
    if ready(client) == count:
        note("the killed engine is back")
    if count == 1:
        return
    wait_until(lambda: working(client), soon())
    for what, wanted in (("scaled down", count - 1), ("scaled up", count)):
        scale(client, wanted, soon())
        note(what, engines=wanted)
    wait_until(lambda: ready(client) == count or trainer.process.poll() is not None, soon())
    if ready(client) == count:
        note("all engines are back")


def scale(client: Any, wanted: int, timeout_s: float) -> None:
    """Ask for so many engines, and wait until so many are there, in whatever state."""
    client.scale("eval", wanted)
    wait_until(lambda: next(g.actual for g in client.fleet().groups if g.name == "eval") == wanted, timeout_s)


def working(client: Any) -> Any | None:
    """An engine with requests of a point in flight; the view may be a second old, so the point is asked about too."""
    for engine in engines(client):
        busy = engine.in_flight and engine.point and str(engine.state) == "ready"
        if busy and str(client.point(engine.point).state) == "running":
            return engine
    return None


def ready(client: Any) -> int:
    return sum(str(engine.state) in ("ready", "pinning") for engine in engines(client))


def wait_until(look: Callable[[], Any], timeout_s: float) -> Any:
    """What a look finds; a service that can't tell just now is asked again.

    Raises:
        RuntimeError: the time is up.
    """
    from eval_service.contract.errors import EvalfleetError

    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        with suppress(EvalfleetError):
            if found := look():
                return found
        time.sleep(0.1)
    raise RuntimeError(f"waited {timeout_s:.0f} s in vain")


class Looks:
    """Looks at the fleet once a second, which is how often the service shows it, from a thread."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self.seen: list[Found] = []

    def __enter__(self) -> Looks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(15.0)

    def _look_on(self) -> None:
        from eval_service.contract.errors import EvalfleetError

        while not self._stop.wait(1.0):
            with suppress(EvalfleetError):
                states = self._client.status().runs.get("fleet", {})
                open_points = sum(
                    states.get(state, 0) for state in ("reserved", "queued", "pinning", "running", "scoring")
                )
                seen = [{"state": str(e.state), "in_flight": e.in_flight} for e in engines(self._client)]
                if open_points:  # before the run and after its last point there is nothing to be busy with
                    self.seen.append({"engines": seen, "open_points": open_points})


# --- two ranks against one


def part_tp(run: Measurement) -> Found:
    """The fleet is off, and both GPUs are the trainer's."""
    stop_service(run)
    found: Found = {}
    base = (*no_evaluation(), "train.save_hf=true")
    short = (*base, f"train.num_steps={run.plan['tp_steps']}", "train.warmup_steps=2")
    # Next to nothing, and nothing in float32: also a weight that is 0 stays what it is.
    still = (*base, "train.num_steps=1", "train.lr=1e-300", "train.weight_decay=0.0")
    batch = f"train.micro_batch_size={run.plan['batch']}"
    runs = {"still": (2, still), "two": (2, short), "one": (1, short)}
    try:
        for name, (ranks, settings) in runs.items():
            trainer = start_training(run, f"tp-{name}", ranks, f"parallel.tensor={ranks}", batch, *settings)
            found[name] = end_training(run, f"tp-{name}", trainer, 200.0)
            run.found["tp"] = found
            run.keep()
        exports = {name: exported(run, f"tp-{name}") for name in runs}
        found |= compare_exports(run.work / "model", exports)
    finally:
        for name in runs:
            shutil.rmtree(run.work / f"tp-{name}" / "checkpoints", ignore_errors=True)
    found["losses"] = loss_figures(found["one"]["losses"], found["two"]["losses"])
    found["losses_apart"] = found["losses"]["max_relative"]
    return found


def exported(run: Measurement, name: str) -> Path:
    """The Hugging Face directory beside its checkpoint."""
    return next((run.work / name / "checkpoints").glob(f"hf/{name}/step_*"))


def compare_exports(model: Path, exports: dict[str, Path]) -> Found:
    """Two ranks' untrained weights against the model that was read, their trained ones against one rank's."""
    import torch

    base, still, one, two = (tensors_of(path) for path in (model, exports["still"], exports["one"], exports["two"]))
    names = set(base) == set(still) == set(one) == set(two)
    equal = names and all(torch.equal(base[name].view(torch.uint8), still[name].view(torch.uint8)) for name in base)
    apart = {name: distance(one[name], two[name]) for name in one}
    moved = {name: distance(one[name], base[name]) for name in one}
    worst = max(apart, key=lambda name: apart[name])
    return {
        "tensors": len(base),
        "same_names": names,
        "untrained_equal": equal,
        "trained_apart_max": apart[worst],
        "trained_apart_worst": worst,
        "trained_moved_max": max(moved.values()),
        "trained_close": apart[worst] <= 0.01,
    }


def distance(one: Any, other: Any) -> float:
    """The norm of the difference, as part of the norm."""
    return float((one.double() - other.double()).norm() / one.double().norm().clamp_min(1e-12))


def tensors_of(snapshot: Path) -> Found:
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(snapshot.glob("*.safetensors")) for name, tensor in load_file(path).items()}


# --- all of it

PARTS: dict[str, Callable[[Measurement], Found]] = {
    "alone": part_alone,
    "points": part_points,
    "steps": part_steps,
    "throughput": part_throughput,
    "fleet": part_fleet,
    "torn": part_torn,
    "tp": part_tp,
}
NEED_S = {
    "alone": 60.0,
    "points": 200.0,
    "steps": 100.0,
    "throughput": 30.0,
    "fleet": 120.0,
    "torn": 250.0,
    "tp": 120.0,
}


def measure(run: Measurement) -> None:
    """Build, start what is needed, and measure one part after another."""
    guarded(run, "versions", lambda _: versions())
    guarded(run, "inputs", lambda _: build_apart(run.work, run.port, run.args.tiny, run.clock, run.plan))
    if "inputs" in run.found["errors"]:
        return
    try:
        for name in run.parts:
            if not run.args.tiny and run.clock.left(1e9) < NEED_S[name]:
                run.found["left_out"].append(name)
                continue
            guarded(run, name, PARTS[name])
    finally:
        stop_service(run)
        run.keep()


def guarded(run: Measurement, name: str, part: Callable[[Measurement], Found]) -> None:
    """A part that fails costs its own figures alone."""
    say(name)
    began = time.monotonic()
    try:
        run.found[name] = part(run)
    except Exception:  # noqa: BLE001 - the edge of a part
        run.found["errors"][name] = traceback.format_exc()
    run.found["seconds"][name] = time.monotonic() - began
    run.keep()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a directory for fleet-<size>.json")
    parser.add_argument("--work", type=Path, help="where everything is written; default: a new temporary directory")
    parser.add_argument("--budget-s", type=float, default=560.0)
    parser.add_argument("--only", help="parts, by comma; default: those of the size")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and CPU engines; always so for size cpu")
    args = parser.parse_args()
    args.tiny = args.tiny or args.size == "cpu"
    size = SIZES[args.size]
    parts = args.only.split(",") if args.only else list(size["parts"])
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    work = args.work or Path(tempfile.mkdtemp(prefix="evalfleet-fleet-"))
    (work / "logs").mkdir(parents=True, exist_ok=True)
    laid_out = {key: size.get(key, False) for key in ("tensor", "data", "engines", "shared")}
    plan = (TINY if args.tiny else FULL) | laid_out
    plan["batch"] *= 1 if args.tiny else size["tensor"] * size["data"]
    run = Measurement(args, plan, parts, work, Clock(args.budget_s))
    date = time.strftime("%Y-%m-%d %H:%M:%S")
    run.found |= {"date": date, "size": args.size, "plan": plan, "errors": {}, "left_out": [], "seconds": {}}
    try:
        measure(run)
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print(json.dumps({key: run.found[key] for key in ("verdicts", "seconds", "left_out", "errors")}, indent=1))
    return 0 if not run.found["errors"] and all(run.found["verdicts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
