"""What there is to know of the trainer and the service on one GPU, in one run: one JSON object, also in `--out`.

    PYTHONPATH=OVERLAY:. python3 scripts/gpu/measure.py --out DIR [--budget-s 525] [--tiny] [--two] [--points N]

1. `export`: benchmarks/export.py, which leaves two snapshots, one training step apart.
2. `run`: the service with one engine, and a supervised fine-tuning of a Qwen3-0.6B-shaped model on the same GPU, with
   exactly three points, checked by `evalfleet check`; every figure of the trainer, the service and the drain from it.
3. `pin`: an engine of our own loads those snapshots: load and pin seconds, how well the canary agrees, and what it says
   of weights one step off, of a dropped tensor and of two swapped ones.
4. `offload`, with `--only offload` alone: the same training with `train.offload_train` and without: losses, exports,
   peak device memory, what is held between steps, time per step.
5. `resume`, with `--only resume` alone: a training that is killed a few steps after a checkpoint, resumed, and held
   against the same one uninterrupted: losses, what each save waited for and took behind, steps beside it.
6. `eval`, with `--only eval` alone: benchmarks/eval.py: tokens per second of a point against the same requests sent to
   the engine by hand, 2,000 samples of 128 tokens; scorers that wait; the controller's memory.
7. `canary`, with `--only canary` alone: canary.py: canaries of a model that learns, in bfloat16, against an engine's.

With `--two` the run trains on the first GPU and the fleet has the second, and afterwards trains the same without any
evaluation: what a point costs the step. `--points` is how many points there are after the baseline (default 2).

Each part runs in a process group of its own with a time limit, so one that fails or hangs costs its own figures alone.
`--tiny` takes a tiny model on the CPU engine, to try the script where there is no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu.canary import measure_canary
from scripts.gpu.figures import loss_figures
from scripts.gpu.inputs import GPU_OVERRIDES, RUN, build_apart
from scripts.gpu.processes import Clock, Process, engine_log, environment, free_port, say, versions, wait_for_engines

FULL = {
    "shape": "qwen3-0.6b",
    "num_steps": 360,
    "batch": 128,
    "lr": 3e-4,
    "warmup": 30,
    "examples": 192,
    "points": 2,
    "buffer": "host",
}
TINY = {
    "shape": "tiny",
    "num_steps": 40,
    "batch": 32,
    "lr": 2e-3,
    "warmup": 5,
    "examples": 24,
    "points": 2,
    "buffer": "host",
}
Keep = Callable[[], None]  # writes what there is so far
# --- 1: the export by itself


def part_export(work: Path, clock: Clock, tiny: bool) -> dict[str, Any]:
    disk = work / "export"
    disk.mkdir()
    argv = ["benchmarks/export.py", "--json", "--out", str(work / "export.json"), "--disk", str(disk)]
    argv += ["--snapshots", str(work / "pair")] + (["--quick"] if tiny else ["--model", str(work / "model")])
    process = Process(argv, work / "logs" / "export.log")
    code = process.wait(clock.left(130.0))
    if not (work / "export.json").exists():
        return {"exit_code": code, "error": process.tail()}
    return {"exit_code": code, **json.loads((work / "export.json").read_text())}


# --- 2: a run that is evaluated as it goes


def part_run(work: Path, clock: Clock, port: int, plan: dict[str, Any]) -> dict[str, Any]:
    from eval_service.contract.client import EvalClient

    files = ["--fleet", str(work / "fleet.toml"), "--suites", str(work / "suites.toml")]
    began = time.monotonic()
    fleets = {"CUDA_VISIBLE_DEVICES": "1"} if plan["two"] else {}
    service = Process(
        ["-m", "eval_service.cli.main", "serve", *files], work / "logs" / "service.log", cwd=work, **fleets
    )
    found: dict[str, Any] = {}
    try:
        with EvalClient(f"http://127.0.0.1:{port}") as client:
            wait_for_engines(client, service, 1, clock.left(330.0))
            found["engine_start_s"] = time.monotonic() - began
            say(f"the engine is there after {found['engine_start_s']:.0f} s")
            found["evaluated"] = train(work, clock, plan)
            found |= figures_of(client, work, port, clock, plan)
            if plan["two"]:
                alone = ["eval.interval=none", "eval.suites=[]", "run.name=alone", f"run.output_dir={work / 'alone'}"]
                found["alone"] = train(work, clock, plan, *alone, name="alone")
                found["step_ratio"] = found["evaluated"]["step_s_mean"] / found["alone"]["step_s_mean"]
    except Exception:  # noqa: BLE001 - the edge of a part: its figures alone are lost
        found["error"] = traceback.format_exc()
    finally:
        found["service_log"] = service.tail()
        found["engine_log"] = engine_log(work)
        service.end(patience_s=30.0)
    return found


def train(work: Path, clock: Clock, plan: dict[str, Any], *settings: str, name: str = "train") -> dict[str, Any]:
    """One training; its mean step from the tenth on, from one step's begin to the next one's, exports included."""
    began = time.monotonic()
    trainer = start_training(work, plan, *settings, name=name)
    code = trainer.wait(clock.left(240.0))
    entries = events_of(work, name)
    begun = [entry["time"] for entry in entries if entry["event"] == "step_begin"][10:]
    gaps = [later - earlier for earlier, later in itertools.pairwise(begun)]
    return {
        "exit_code": code,
        "wall_s": time.monotonic() - began,
        "log": trainer.tail(1500),
        "steps": len(gaps),
        "exports": sum(entry["event"] == "eval_exported" for entry in entries),
        "step_s_mean": sum(gaps) / len(gaps) if gaps else None,
        "step_s_median": sorted(gaps)[len(gaps) // 2] if gaps else None,
        "step_s_slowest": sorted(gaps)[-8:],
    }


def start_training(work: Path, plan: dict[str, Any], *settings: str, name: str) -> Process:
    """`run.toml`'s, with settings over it."""
    argv = ["-m", "trainer.main", "--config", str(work / "run.toml")]
    argv += [part for setting in settings for part in ("--set", setting)]
    gpu = {"CUDA_VISIBLE_DEVICES": "0"} if plan["two"] else {}
    return Process(argv, work / "logs" / f"{name}.log", cwd=work, **gpu)


def figures_of(client: Any, work: Path, port: int, clock: Clock, plan: dict[str, Any]) -> dict[str, Any]:
    log = events_of(work, "train")
    points = [point.model_dump(mode="json") for point in client.points(run=RUN).points]
    keys = ("step", "kind", "force", "state", "reason", "detail", "score", "stderr", "lag_steps", "pin_proof")
    asked = ["--metric", "exact_match", "--threshold", "0.6", "--expect-points", str(plan["points"] + 1)]
    asked += ["--url", f"http://127.0.0.1:{port}"]
    check = subprocess.run(
        [sys.executable, "-m", "eval_service.cli.main", "check", RUN, *asked],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=work,
        timeout=clock.left(60.0),
        check=False,
    )
    receipt = work / "train" / "receipt.json"
    states: dict[str, int] = {}
    for point in points:
        states[point["state"]] = states.get(point["state"], 0) + 1
    return {
        "points": [{key: point[key] for key in keys} | {"timings": point["timings"]} for point in points],
        "points_by_state": states,
        "check": {"exit_code": check.returncode, "said": (check.stdout + check.stderr)[-1500:]},
        "receipt": json.loads(receipt.read_text()) if receipt.exists() else None,
        **step_figures(log),
    }


def step_figures(log: list[dict[str, Any]]) -> dict[str, Any]:
    """From the trainer's own log: step times, drain, and the trainer's figures of each export."""
    begun = {entry["step"]: entry["time"] for entry in log if entry["event"] == "step_begin"}
    ended = {entry["step"]: entry["time"] for entry in log if entry["event"] == "step_end"}
    times = sorted(ended[step] - begun[step] for step in ended)
    losses = [entry["loss"] for entry in log if entry["event"] == "step_end"]
    at = {entry["event"]: entry["time"] for entry in log}
    return {
        "step_s_median": times[len(times) // 2] if times else None,
        "losses": losses[:: max(1, len(losses) // 20)],
        "drain_s": at["drain_end"] - at["drain_begin"] if "drain_end" in at else None,
        "exports": [entry for entry in log if entry["event"] in ("eval_staged", "eval_exported", "eval_failed")],
    }


# --- 3: an engine of our own


def part_pin(work: Path, clock: Clock, tiny: bool) -> dict[str, Any]:
    process = Process(
        [str(Path(__file__)), "--pin-child", str(work)] + (["--tiny"] if tiny else []), work / "logs" / "pin.log"
    )
    code = process.wait(clock.left(250.0))
    process.end()
    out = work / "pin.json"
    found = json.loads(out.read_text()) if out.exists() else {}
    return {"exit_code": code, **found, **({} if code == 0 else {"log": process.tail()})}


async def pin_child(work: Path, tiny: bool) -> None:
    from eval_service.engine.pin import SystemClock
    from eval_service.engine.server import BootOptions, boot_server
    from eval_service.fleet_config import GroupConfig

    found: dict[str, Any] = {}
    first, second = sorted((work / "pair" / "bench").glob("step_*"))
    group = GroupConfig(
        model=first,
        grade="sglang-cpu" if tiny else "sglang",
        num_gpus_per_engine=0 if tiny else 1,
        start_timeout_s=240,
        overrides={} if tiny else GPU_OVERRIDES,
    )
    began = time.monotonic()
    server = await boot_server(group, BootOptions(log=work / "logs" / "pin-engine.log"), SystemClock())
    found["second_engine_start_s"] = time.monotonic() - began
    try:
        for name, part in (("loads", _loads), ("pins", _pins), ("canary", _canary)):
            try:
                found[name] = await part(server, first, second, work)
            except Exception:  # noqa: BLE001 - the edge of a part: its figures alone are lost
                found[f"{name}_error"] = traceback.format_exc()
            (work / "pin.json").write_text(json.dumps(found))
    finally:
        await server.stop()


async def _loads(server: Any, first: Path, second: Path, work: Path) -> list[float]:
    """SGLang's own load."""
    times = []
    for number in range(6):
        began = time.monotonic()
        snapshot = second if number % 2 == 0 else first
        await server.api.abort_all(timeout_s=30.0)
        await server.api.update_weights_from_disk(str(snapshot), f"load{number}", timeout_s=120.0)
        times.append(time.monotonic() - began)
    return times


async def _pins(server: Any, first: Path, second: Path, work: Path) -> list[dict[str, Any]]:
    """Our pin of the same: load, read back, fingerprint and canary."""
    from eval_service.contract.manifest import read_manifest
    from eval_service.engine.protocol import PinOrder

    seen = []
    server.pinner.held = None
    for number in range(6):
        snapshot = second if number % 2 == 0 else first
        fields: dict[str, Any] = {
            "snapshot": str(snapshot),
            "manifest": read_manifest(snapshot),
            "weight_version": f"pin{number}",
            "timeout_s": 120.0,
            "visibility_timeout_s": 5.0,
        }
        known = {name: value for name, value in fields.items() if name in _field_names(PinOrder)}
        began = time.monotonic()
        evidence = await server.pinner.pin(PinOrder(**known))
        parts = {name: getattr(evidence, name) for name in ("prepare_s", "load_s", "verify_s", "canary_diff")}
        seen.append({"pin_s": time.monotonic() - began, **parts})
    return seen


def _field_names(kind: Any) -> set[str]:
    return set(getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", {}))


async def _canary(server: Any, first: Path, second: Path, work: Path) -> dict[str, float | None]:
    """Mean absolute difference of log-probs, in nats, from the canary of `second`."""
    from eval_service.contract.canary import compare_canary
    from eval_service.contract.manifest import read_manifest

    canary = read_manifest(second).canary
    assert canary is not None

    async def diff(load: list[Path]) -> float:
        for snapshot in load:
            await server.api.abort_all(timeout_s=30.0)  # SGLang ends itself if it can't flush its cache
            await server.api.update_weights_from_disk(str(snapshot), snapshot.name, timeout_s=120.0)
        seen = [await server.api.input_logprobs(row, timeout_s=60.0) for row in canary.token_ids]
        return compare_canary(canary.logprobs, seen, canary.dtype).mean

    names = list(tensors_of(second))
    dropped = "model.layers.1.mlp.down_proj.weight"
    swapped = ("model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight")
    assert dropped in names
    changed(second, work / "dropped", lambda tensors: {k: v for k, v in tensors.items() if k != dropped})
    changed(second, work / "swapped", lambda tensors: {**tensors, **_swap(tensors, *swapped)})
    result: dict[str, float | None] = {
        "tolerance": compare_canary(canary.logprobs, canary.logprobs, canary.dtype).mean_bound
    }
    result["same_weights"] = await diff([second])
    result["one_step_off"] = await diff([first])
    result["two_tensors_swapped"] = await diff([work / "swapped"])
    # An engine keeps what it held of a tensor that does not come: here the other model's.
    result["a_tensor_dropped_over_one_step_off"] = await diff([first, work / "dropped"])
    result["a_tensor_dropped_over_swapped_weights"] = await diff([work / "swapped", work / "dropped"])
    result["same_weights_again"] = await diff([second])
    return result


def _swap(tensors: dict[str, Any], one: str, other: str) -> dict[str, Any]:
    return {one: tensors[other].clone(), other: tensors[one].clone()}


def tensors_of(snapshot: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {k: v for path in sorted(snapshot.glob("*.safetensors")) for k, v in load_file(path).items()}


def changed(snapshot: Path, target: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A copy of a snapshot with other tensors."""
    from safetensors.torch import save_file

    target.mkdir()
    for path in snapshot.iterdir():
        if path.suffix != ".safetensors" and path.name != "model.safetensors.index.json":
            shutil.copy(path, target / path.name)
    save_file(change(tensors_of(snapshot)), target / "model.safetensors", metadata={"format": "pt"})


# --- 4: parameters and optimizer that wait on the host between steps


def part_offload(work: Path, clock: Clock, plan: dict[str, Any], found: dict[str, Any], keep: Keep) -> None:
    """The same training twice, exports included, with `train.offload_train` and without."""
    for name, away in (("stays", "false"), ("waits", "true")):
        settings = ["eval.interval=none", "eval.suites=[]", "train.num_steps=30", "train.save_interval=15"]
        settings += ["train.save_hf=true", f"run.name={name}", f"run.output_dir={work / name}"]
        found[name] = train(work, clock, plan, *settings, f"train.offload_train={away}", name=name)
        log = events_of(work, name)
        steps = [entry for entry in log if entry["event"] == "step_end"]
        for figure in ("peak_device_bytes", "waiting_device_bytes"):
            found[name][figure] = max((entry[figure] for entry in steps[2:] if figure in entry), default=None)
        found[name]["losses"] = [entry["loss"] for entry in steps]
        saved = (work / name / "checkpoints" / "hf" / name).glob("step_*")
        found[name]["exported"] = sorted(path.name for path in saved)
        found[name]["saves"] = [entry for entry in log if entry["event"] in ("save", "saved", "save_failed")]
        keep()
        if found[name]["exit_code"] != 0:  # refused, as it is where there is no GPU, or out of time
            return
    stays, waits = found["stays"], found["waits"]
    found["same_losses"] = stays["losses"] == waits["losses"]
    found["losses_apart"] = loss_figures(stays["losses"], waits["losses"])["max_relative"]
    found["same_exports"] = stays["exported"] == waits["exported"]
    found["step_ratio"] = waits["step_s_median"] / stays["step_s_median"]


# --- 5: a killed training


def part_resume(work: Path, clock: Clock, plan: dict[str, Any], found: dict[str, Any], keep: Keep) -> None:
    """The same training uninterrupted, and killed and resumed."""
    base = ["eval.interval=none", "eval.suites=[]", "train.num_steps=60", "train.save_interval=20"]
    base += ["train.keep_checkpoints=1"]
    whole = [*base, "run.name=whole", f"run.output_dir={work / 'whole'}"]
    killed = [*base, "run.name=killed", f"run.output_dir={work / 'killed'}"]
    found["whole"] = train(work, clock, plan, *whole, name="whole")
    found["saves"] = [entry for entry in events_of(work, "whole") if entry["event"] in ("save", "saved")]
    shutil.rmtree(work / "whole" / "checkpoints", ignore_errors=True)
    keep()
    found["killed_at"] = kill_in_run(work, clock, plan, killed, step=45)
    found["resumed"] = train(work, clock, plan, *killed, name="killed")
    shutil.rmtree(work / "killed" / "checkpoints", ignore_errors=True)
    log = events_of(work, "killed")
    found["starts"] = [entry["start"] for entry in log if entry["event"] == "start"]
    one, other = (losses_of(events_of(work, name)) for name in ("whole", "killed"))
    found["same_losses"] = one == other
    # On a GPU sums come in no fixed order: what the steps before the kill are apart, they owe to that alone.
    found["losses"] = loss_figures([one[step] for step in sorted(one)], [other.get(step, 0.0) for step in sorted(one)])


def kill_in_run(work: Path, clock: Clock, plan: dict[str, Any], settings: list[str], step: int) -> int:
    """SIGKILL once a step has ended and the checkpoint before it is there; returns the last step that was seen."""
    trainer = start_training(work, plan, *settings, name="killed")
    until = time.monotonic() + clock.left(200.0)
    try:
        while time.monotonic() < until and trainer.process.poll() is None:
            log = events_of(work, "killed")
            ended = max((entry["step"] for entry in log if entry["event"] == "step_end"), default=0)
            if ended >= step and any(entry["event"] == "saved" for entry in log):
                return ended
            time.sleep(0.02)
    finally:
        trainer.end(patience_s=0.0)
    raise RuntimeError(f"it did not come to step {step}: {trainer.tail()}")


def events_of(work: Path, name: str) -> list[dict[str, Any]]:
    """A run's log so far; a line that was cut is left out."""
    path, entries = work / name / "steps.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def losses_of(log: list[dict[str, Any]]) -> dict[int, float]:
    """Of each step, the last time that it was trained."""
    return {entry["step"]: entry["loss"] for entry in log if entry["event"] == "step_end"}


# --- 6: a point against its engine by hand


def part_eval(work: Path, clock: Clock, tiny: bool) -> dict[str, Any]:
    overrides = {} if tiny else GPU_OVERRIDES | {"cuda_graph_max_bs_decode": 256, "mem_fraction_static": 0.6}
    argv = ["-m", "benchmarks.eval", "--json", "--out", str(work / "eval.json"), "--model", str(work / "model")]
    argv += ["--overrides", json.dumps(overrides)] + (["--quick"] if tiny else ["--pairs", "3"])
    process = Process(argv, work / "logs" / "eval.log")
    code = process.wait(clock.left(480.0))
    process.end()
    if not (work / "eval.json").exists():
        return {"exit_code": code, "error": process.tail()}
    return {"exit_code": code, **json.loads((work / "eval.json").read_text())}


# --- all of it


def verdicts(result: dict[str, Any]) -> dict[str, Any]:
    """What is to be reached, and whether it was."""
    run = result.get("run", {})
    points = {point["step"]: point for point in run.get("points", [])}
    last = points.get(max(points, default=0), {})
    if not run:
        return {"export targets": result.get("export", {}).get("targets")}
    wanted = {
        "every point done": run.get("points_by_state") == {"done": result["plan"]["points"] + 1},
        "evalfleet check": run.get("check", {}).get("exit_code") == 0,
        "score at step 0 <= 0.1": (points.get(0, {}).get("score") or 0.0) <= 0.1 if points else False,
        "score at the end >= 0.6": (last.get("score") or 0.0) >= 0.6,
        "final forced": bool(last.get("force")),
        "drained": bool((run.get("receipt") or {}).get("drained")),
    }
    return {**wanted, "export targets": result.get("export", {}).get("targets")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a directory for measured.json and the logs' ends")
    parser.add_argument("--work", type=Path, help="where everything is written; default: a new temporary directory")
    parser.add_argument("--budget-s", type=float, default=525.0)
    parser.add_argument("--only", default="export,run,pin", help="parts, by comma")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--two", action="store_true", help="train on the first GPU, the fleet on the second")
    parser.add_argument("--points", type=int, default=2, help="after the baseline")
    parser.add_argument("--buffer", choices=("host", "device"), default="host", help="as eval.buffer")
    parser.add_argument("--pin-child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pin_child:
        asyncio.run(pin_child(args.pin_child, args.tiny))
        return 0
    result = measure(args)
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "measured.json").write_text(text)
    print(text)
    return 0 if not result["errors"] else 1


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import tempfile

    clock, port = Clock(args.budget_s), free_port()
    plan = (TINY if args.tiny else FULL) | {"two": args.two, "points": args.points, "buffer": args.buffer}
    work = args.work or Path(tempfile.mkdtemp(prefix="evalfleet-measure-"))
    (work / "logs").mkdir(parents=True, exist_ok=True)
    date = time.strftime("%Y-%m-%d %H:%M:%S")
    result: dict[str, Any] = {"date": date, "plan": plan, "errors": {}, "seconds": {}}

    def keep() -> None:  # what there is so far, should the rest be cut short
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "measured.json").write_text(json.dumps(result, indent=1))

    parts: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
        "versions": lambda _: versions(),
        "inputs": lambda _: build_apart(work, port, args.tiny, clock, plan),
        "export": lambda _: part_export(work, clock, args.tiny),
        "run": lambda _: part_run(work, clock, port, plan),
        "pin": lambda _: part_pin(work, clock, args.tiny),
        "offload": lambda found: part_offload(work, clock, plan, found, keep),
        "resume": lambda found: part_resume(work, clock, plan, found, keep),
        "eval": lambda _: part_eval(work, clock, args.tiny),
        "canary": lambda _: measure_canary(work, clock, plan, start_training),
    }
    for name in ("versions", "inputs", *args.only.split(",")):
        say(name)
        began = time.monotonic()
        found = result[name] = {}
        try:
            found.update(parts[name](found) or {})
        except Exception:  # noqa: BLE001 - the edge of a part: its figures alone are lost
            result["errors"][name] = traceback.format_exc()
        result["seconds"][name] = time.monotonic() - began
        keep()
    result["verdicts"] = verdicts(result)
    if args.work is None:
        shutil.rmtree(work, ignore_errors=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
