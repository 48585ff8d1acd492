"""How well an engine reproduces the canaries of a model that learns: what rounding makes of them, what a fault does.

A part of measure.py. A training leaves Hugging Face directories on its way, the last two one step apart, while an
engine starts beside it, which then loads one after the other.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu.inputs import GPU_OVERRIDES
from scripts.gpu.processes import Clock, Process, say

STEPS, POINTS = 240, 6


def measure_canary(work: Path, clock: Clock, plan: dict[str, Any], start: Callable[..., Process]) -> dict[str, Any]:
    """Train and judge.

    Args:
        start: begins a training of `run.toml`'s, with settings over it.
    """
    every = STEPS // POINTS
    settings = ["eval.interval=none", "eval.suites=[]", f"train.num_steps={every * POINTS + 1}", "train.dtype=bfloat16"]
    settings += [f"train.save_interval={every}", "train.save_hf=true", "train.keep_checkpoints=1"]
    settings += ["train.schedule=constant", "run.name=learns", f"run.output_dir={work / 'learns'}"]
    marker, out = work / "canary.trained", work / "canary.json"
    child = Process([__file__, str(work), json.dumps(plan["shape"] == "tiny")], work / "logs" / "canary.log")
    trainer = start(work, plan, *settings, name="learns")
    try:
        code = trainer.wait(clock.left(240.0))
        say("trained; the engine judges")
        marker.write_text("")
        judged = child.wait(clock.left(240.0))
    finally:
        for process in (trainer, child):
            process.end()
    found = json.loads(out.read_text()) if out.exists() else {}
    told = {} if code == 0 and judged == 0 else {"log": trainer.tail(), "engine_log": child.tail()}
    return {"exit_code": code if code != 0 else judged, **found, **told}


async def judge(work: Path, tiny: bool) -> None:
    """Load each directory into an engine, and hold what it gives against its own canary and the next one's."""
    from eval_service.engine.pin import SystemClock
    from eval_service.engine.server import BootOptions, boot_server
    from eval_service.fleet_config import GroupConfig

    group = GroupConfig(
        model=work / "model",
        grade="sglang-cpu" if tiny else "sglang",
        num_gpus_per_engine=0 if tiny else 1,
        start_timeout_s=240,
        overrides={} if tiny else GPU_OVERRIDES,
    )
    began, out = time.monotonic(), work / "canary.json"
    found: dict[str, Any] = {}
    server = await boot_server(group, BootOptions(log=work / "logs" / "canary-engine.log"), SystemClock())
    found["engine_start_s"] = time.monotonic() - began
    try:
        await asyncio.to_thread(_wait_for, work / "canary.trained")
        hf = work / "learns" / "checkpoints" / "hf" / "learns"
        snapshots = sorted(hf.glob("step_*"), key=lambda path: int(path.name.split("_")[1].split("-")[0]))
        found["snapshots"] = []
        for place, snapshot in enumerate(snapshots):
            found["snapshots"].append(await _held_against(server, snapshot, snapshots[place + 1 : place + 2]))
            out.write_text(json.dumps(found))
        try:
            found["faults"] = await _faults(server, snapshots[-1], work)
        except Exception:  # noqa: BLE001 - costs its own figures alone
            found["faults_error"] = traceback.format_exc()
        out.write_text(json.dumps(found))
    finally:
        await server.stop()


def _wait_for(marker: Path) -> None:
    while not marker.exists():
        time.sleep(0.2)


async def _held_against(server: Any, snapshot: Path, following: list[Path]) -> dict[str, Any]:
    from eval_service.contract.manifest import read_manifest

    manifest = read_manifest(snapshot)
    assert manifest.canary is not None
    seen = await _logprobs(server, snapshot, manifest.canary)
    told = {"step": manifest.step, "dtype": manifest.canary.dtype, **_compared(manifest.canary, seen)}
    for other in following:
        wanted = read_manifest(other)
        assert wanted.canary is not None
        told |= {"next": wanted.step, "from_the_next": _compared(wanted.canary, seen, pairs=False)}
    return told


def _compared(canary: Any, seen: list[list[float]], *, pairs: bool = True) -> dict[str, Any]:
    """The agreement, with each log-prob, the trainer's and the engine's."""
    from eval_service.contract.canary import compare_canary

    both = [(a, b) for one, other in zip(canary.logprobs, seen, strict=True) for a, b in zip(one, other, strict=True)]
    told = asdict(compare_canary(canary.logprobs, seen, canary.dtype))
    told |= {"mean_logprob": sum(a for a, _ in both) / len(both), "largest": max(abs(a - b) for a, b in both)}
    return told | ({"logprobs": [[round(a, 5), round(b, 5)] for a, b in both]} if pairs else {})


async def _faults(server: Any, snapshot: Path, work: Path) -> dict[str, Any]:
    """Tensors swapped, scaled, zero, in another order: each against the canary of the whole."""
    from eval_service.contract.manifest import read_manifest
    from scripts.gpu.measure import changed

    canary = read_manifest(snapshot).canary
    assert canary is not None
    heads = json.loads((snapshot / "config.json").read_text())["num_attention_heads"]
    first, second = (f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1))
    query = "model.layers.1.self_attn.q_proj.weight"
    faults: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "two_tensors_swapped": lambda t: {**t, first: t[second].clone(), second: t[first].clone()},
        "a_layers_query_heads_reversed": lambda t: {
            **t,
            query: t[query].unflatten(0, (heads, -1)).flip(0).flatten(0, 1).contiguous(),
        },
        "a_layers_query_rows_reversed": lambda t: {**t, query: t[query].flip(0).contiguous()},
        "one_tensor_a_hundredth_larger": lambda t: {**t, first: t[first] * 1.01},
        "one_tensor_zero": lambda t: {**t, second: t[second] * 0},
    }
    told = {}
    for name, change in faults.items():
        changed(snapshot, work / f"canary-{name}", change)
        told[name] = _compared(canary, await _logprobs(server, work / f"canary-{name}", canary))
    told["none"] = _compared(canary, await _logprobs(server, snapshot, canary), pairs=False)
    return told


async def _logprobs(server: Any, snapshot: Path, canary: Any) -> list[list[float]]:
    await server.api.abort_all(timeout_s=30.0)
    await server.api.update_weights_from_disk(str(snapshot), f"canary-{time.time_ns()}", timeout_s=120.0)
    return [await server.api.input_logprobs(row, timeout_s=60.0) for row in canary.token_ids]


if __name__ == "__main__":
    asyncio.run(judge(Path(sys.argv[1]), json.loads(sys.argv[2])))
