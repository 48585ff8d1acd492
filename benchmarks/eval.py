"""What a point costs beside its engine: `python -m benchmarks.eval [--quick] [--json] [--samples N] [--tokens N]`.

1. Tokens per second of a point of the real service against the same requests sent to the same engine by hand, as many
   at once, in turns. The engine's prefix cache is empty before each. Real SGLang, on a GPU where there is one.
2. 64 samples through an async scorer that waits for a second, from the first request to the recorded result.
3. The controller's memory over a point of 100,000 samples, in a process of its own (benchmarks.samples_memory).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.harness import ROOT, Report, arguments, at_least, at_most, median, versions_of
from benchmarks.samples_memory import point
from eval_service.contract.client import EvalClient
from eval_service.contract.states import ENDS, PointState
from eval_service.contract.wire import DispatchRequest, EngineState, Kind, PointView, RunSpec, Source
from eval_service.demo.processes import Family, terminable
from eval_service.demo.service import HOST, free_port, wait_ready
from eval_service.engine.grades import cuda_available
from eval_service.engine.pin import SystemClock
from eval_service.engine.server import BootOptions, Server, boot_server
from eval_service.fleet_config import GroupConfig
from eval_service.suites.generation import request_for
from eval_service.suites.samples import read_samples
from eval_service.suites.scoring import ScorerPool
from eval_service.suites.suite import Suite, load_suites

_KEYS = ("EVALFLEET_BENCHMARK_KEY", "EVALFLEET_BENCHMARK_ADMIN_KEY")
_RUN, _SUITE, _GROUP = "speed", "speed", "measured"
_START_S, _POINT_S, _LOOK_S = 400.0, 900.0, 0.1
_AWAITED = 64
_FLEET = """
[service]
roots = [".", "{model}"]
state_dir = "state"
port = {port}

[groups.eval]
model = "{model}"
num_engines = [0, 1]
num_gpus_per_engine = 0
server_concurrency = {concurrency}

[groups.measured]
kind = "attached"
model = "{model}"
urls = ["{url}"]
api_key_env = "{keys[0]}"
admin_api_key_env = "{keys[1]}"
server_concurrency = {concurrency}
{dtype}"""
_SUITES = """
[suites.speed]
sampling = {{ max_new_tokens = {tokens} }}
datasets = [{{ name = "all", path = "speed.jsonl" }}]
"""
_SCORER = """
import asyncio

async def wait(output, answer):
    await asyncio.sleep(1.0)
    return 1.0
"""
_AWAITED_SUITE = """
[suites.awaited]
datasets = [{ name = "all", path = "awaited.jsonl" }]
scorer = { name = "function", function = "waiting_scorer:wait" }
"""


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens of one round, and the seconds that they took: of generating, and with scoring and recording."""

    tokens: int
    generate_s: float
    all_s: float
    outputs: tuple[str, ...] = ()  # of a point

    @property
    def generated(self) -> float:
        """Tokens per second while it generated."""
        return self.tokens / self.generate_s

    @property
    def recorded(self) -> float:
        """Tokens per second from the first request to the recorded result."""
        return self.tokens / self.all_s


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine, a service that it is attached to, and what is asked of both."""

    model: Path
    server: Server
    client: EvalClient
    suite: Suite
    concurrency: int

    async def by_hand(self) -> Speed:
        """The suite's requests, sent to the engine with nothing in between."""
        asked = [request_for(ask.prompt, self.suite.sampling, seed=ask.seed) for ask in self.suite.asks()]
        timeout, connector = aiohttp.ClientTimeout(total=_POINT_S), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.server.url, connector=connector, timeout=timeout) as session:
            await self._empty_cache(session)
            began = time.perf_counter()
            left = iter(asked)
            made = await asyncio.gather(*(self._ask(session, left) for _ in range(self.concurrency)))
            took_s = time.perf_counter() - began
        return Speed(sum(made), took_s, took_s)

    async def _ask(self, session: aiohttp.ClientSession, left: Iterator[dict[str, Any]]) -> int:
        tokens = 0
        headers = {"authorization": f"Bearer {self.server.keys.api}"}
        for body in left:
            async with session.post("/generate", json=body, headers=headers, raise_for_status=True) as answer:
                tokens += (await answer.json())["meta_info"]["completion_tokens"]
        return tokens

    async def _empty_cache(self, session: aiohttp.ClientSession) -> None:
        """As a point's pin does."""
        headers = {"authorization": f"Bearer {self.server.keys.admin}"}
        async with session.post("/flush_cache", headers=headers, raise_for_status=True):
            pass

    async def by_point(self, step: int) -> Speed:
        """A point of the service: pinned, generated, scored, recorded; the pin's seconds are not counted."""
        view = await asyncio.to_thread(self._point, step)
        assert view.samples_path is not None
        timings = view.timings
        assert timings.generate_s is not None
        assert timings.score_s is not None
        samples = read_samples(Path(view.samples_path), limit=self.suite.size).samples
        tokens = sum(sample.output_tokens for sample in samples)
        outputs = tuple(sample.output for sample in samples)
        return Speed(tokens, timings.generate_s, timings.generate_s + timings.score_s, outputs)

    def _point(self, step: int) -> PointView:
        request = DispatchRequest(
            run=_RUN, step=step, suites=(_SUITE,), kind=Kind.MANUAL, source=Source.CALLER,
            snapshot=str(self.model), reservation=str(uuid.uuid4()),
        )  # fmt: skip
        asked = self.client.dispatch(request).points[0].id
        until = time.monotonic() + _POINT_S
        while (view := self.client.point(asked)).state not in ENDS:
            if time.monotonic() > until:
                raise TimeoutError(f"the point is {view.state} after {_POINT_S:.0f} s")
            time.sleep(_LOOK_S)
        if view.state is not PointState.DONE:
            raise RuntimeError(f"the point is {view.state}: {view.reason}: {view.detail}")
        return view


# --- tokens per second


async def speeds(base: Path, given: argparse.Namespace) -> tuple[list[tuple[Speed, Speed]], dict[str, Any]]:
    """Pairs of (by hand, by a point), one after the other."""
    model = _build(base, given)
    overrides = json.loads(given.overrides)
    group = GroupConfig(model=model, start_timeout_s=_START_S, dtype=given.dtype, overrides=overrides)
    server = await boot_server(group, BootOptions(log=base / "engine.log"), SystemClock())
    try:
        with _service(base, model, server, given) as client:
            suite = load_suites(base / "suites.toml")[_SUITE]
            assert isinstance(suite, Suite)
            bench = Bench(model, server, client, suite, given.concurrency)
            await bench.by_hand()  # the engine has compiled what it compiles
            pairs = [await _pair(bench, number) for number in range(given.pairs)]
    finally:
        await server.stop()
    tokens = pairs[0][0].tokens
    return pairs, {"samples": suite.size, "tokens_per_sample": tokens / suite.size, "in_flight": given.concurrency}


async def _pair(bench: Bench, number: int) -> tuple[Speed, Speed]:
    """Who begins alternates: a machine that warms up or slows down is nobody's advantage."""
    if number % 2:
        by_point = await bench.by_point(number)
        return await bench.by_hand(), by_point
    return await bench.by_hand(), await bench.by_point(number)


def _build(base: Path, given: argparse.Namespace) -> Path:
    """Prompts, suite, and the model, in a process of its own: a GPU's memory is the engine's."""
    model = Path(given.model or base / "model").resolve()
    if not given.model:
        module, shape = ("benchmarks.export", ", 'qwen3-0.6b'") if cuda_available() else ("eval_service.demo.tiny", "")
        code = f"import pathlib, {module} as built; built.build_model(pathlib.Path({str(model)!r}){shape})"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=_START_S)
    prompts = (f"{number:6} is the number; and what comes of it?" for number in range(given.samples))
    rows = (json.dumps({"prompt": prompt, "answer": "-"}) for prompt in prompts)
    (base / "speed.jsonl").write_text("\n".join(rows))
    (base / "suites.toml").write_text(_SUITES.format(tokens=given.tokens))
    return model


@contextmanager
def _service(base: Path, model: Path, server: Server, given: argparse.Namespace) -> Iterator[EvalClient]:
    """`evalfleet serve`, with the engine attached and a run to put points into."""
    family, port = Family(), free_port()
    dtype = f'dtype = "{given.dtype}"\n' if given.dtype else ""
    told = {"url": server.url, "keys": _KEYS, "concurrency": given.concurrency, "dtype": dtype}
    (base / "fleet.toml").write_text(_FLEET.format(model=model, port=port, **told))
    keys = dict(zip(_KEYS, (server.keys.api, server.keys.admin), strict=True))
    try:
        files = ["--fleet", "fleet.toml", "--suites", "suites.toml", "--host", HOST, "--port", str(port)]
        command = ["eval_service.cli.main", "serve", *files]
        child = family.start("the service", command, log=base / "service.log", cwd=base, env=keys)
        with EvalClient(f"http://{HOST}:{port}") as client:
            wait_ready(child, client, timeout_s=_START_S)
            _wait_attached(client)
            client.put_run(_RUN, RunSpec(root=str(base), suites=(_SUITE,), max_in_flight=100))
            yield client
    finally:
        family.end()


def _wait_attached(client: EvalClient) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        groups = {group.name: group for group in client.fleet().groups}
        if any(engine.state is EngineState.READY for engine in groups[_GROUP].engines):
            return
        time.sleep(_LOOK_S)
    raise TimeoutError("the engine was not attached")


# --- scorers that wait, and memory


async def awaited_s(base: Path) -> float:
    """Seconds of a point whose 64 samples are scored by a coroutine that waits; its scorer process is there already."""
    rows = (json.dumps({"prompt": f"p{n}", "answer": "-"}) for n in range(_AWAITED))
    (base / "awaited.jsonl").write_text("\n".join(rows))
    (base / "waiting_scorer.py").write_text(_SCORER)
    (base / "awaited.toml").write_text(_AWAITED_SUITE)
    suite = load_suites(base / "awaited.toml")["awaited"]
    assert isinstance(suite, Suite)
    scorers = ScorerPool(1, 30.0)
    try:
        await scorers.score("exact", ["a"], ["a"])
        began = time.perf_counter()
        await point(suite, base, scorers)
        return time.perf_counter() - began
    finally:
        scorers.close()


def memory_mb(samples: int) -> float:
    """What a point of so many samples takes over the idle size, at its peak."""
    command = [sys.executable, "-m", "benchmarks.samples_memory", str(samples)]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=_POINT_S).stdout
    return float(json.loads(told)["over_idle_mb"])


def _differing(one: Speed, other: Speed) -> int:
    """Greedy samples of one snapshot that came out otherwise: none in float32, some where batches round otherwise."""
    return sum(a != b for a, b in zip(one.outputs, other.outputs, strict=True))


# --- the whole


def measure(given: argparse.Namespace) -> Report:
    """Everything that this benchmark tells; what there is so far goes to `--out` as it comes."""
    packages = ("evalfleet", "sglang", "torch", "ray", "aiohttp")
    report = Report("eval: what a point costs beside its engine", versions_of(*packages))
    report.counts |= {"cuda": cuda_available(), "memory_samples": given.memory_samples}
    report.counts |= {"dtype": given.dtype or "the model's"}
    with tempfile.TemporaryDirectory(prefix="evalfleet-") as base:
        pairs: list[tuple[Speed, Speed]] = []
        if find_spec("sglang"):
            pairs, counts = asyncio.run(speeds(Path(base), given))
            report.counts |= counts
        _compare(report, pairs)
        _keep(report, given)
        waited_s = asyncio.run(awaited_s(Path(base)))
    report.targets[f"{_AWAITED} samples, an async scorer that waits 1 s"] = at_most(waited_s, 2.5)
    _keep(report, given)
    report.targets["MB over the idle size at the peak"] = at_most(memory_mb(given.memory_samples), 500.0)
    _keep(report, given)
    return report


def _compare(report: Report, pairs: list[tuple[Speed, Speed]]) -> None:
    ratios = [by_point.generated / by_hand.generated for by_hand, by_point in pairs]
    whole = [by_point.recorded / by_hand.generated for by_hand, by_point in pairs]
    report.counts["pairs"] = len(pairs)
    report.figures |= {
        "by_hand_tokens_per_s": [round(by_hand.generated) for by_hand, _ in pairs],
        "by_a_point_tokens_per_s": [round(by_point.generated) for _, by_point in pairs],
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratios_with_scoring_and_recording": [round(ratio, 3) for ratio in whole],
        "samples_that_differ_from_the_first_points": [_differing(pairs[0][1], by_point) for _, by_point in pairs],
    }
    least = 0.95 if cuda_available() else 0.9
    name = "tokens/s: a point / the engine by hand, median of the pairs"
    report.targets[name] = at_least(median(ratios) if ratios else None, least)


def _keep(report: Report, given: argparse.Namespace) -> None:
    if given.out:
        Path(given.out).write_text(json.dumps(asdict(report)))


def main() -> int:
    """Measure and print; 1 where a target was missed."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--samples", type=int, help="of a point (default: 2000, 64 with --quick)")
    parser.add_argument("--tokens", type=int, default=128, help="of a sample")
    parser.add_argument("--pairs", type=int, help="default: 5, 1 with --quick")
    parser.add_argument("--memory-samples", type=int, help="default: 100000, 2000 with --quick")
    parser.add_argument("--concurrency", type=int, help="requests in flight (default: 256 on a GPU, else 32)")
    parser.add_argument("--model", help="an HF directory (default: random weights, Qwen3-0.6B-shaped on a GPU)")
    parser.add_argument("--dtype", help="what the engine computes in, such as bfloat16 (default: the model's)")
    parser.add_argument("--overrides", default="{}", help="SGLang server arguments, as JSON")
    parser.add_argument("--out", help="a file that the JSON is also written to")
    given = parser.parse_args()
    for name, full, quick in (("samples", 2000, 64), ("pairs", 5, 1), ("memory_samples", 100_000, 2000)):
        if getattr(given, name) is None:
            setattr(given, name, quick if given.quick else full)
    given.concurrency = given.concurrency or (256 if cuda_available() else 32)
    with terminable():
        return measure(given).show(as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
