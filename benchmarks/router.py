"""Our proxy and what a user would pick instead, in front of the same engines; and the in-process path of the lanes.

Rounds are interleaved and the medians compared, since a machine's other work comes and goes: only ratios of one run
mean anything. The engines are processes that answer 1 KB with 1 KB at once, or after 50 ms.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Report, arguments, at_least, at_most, cpu_s, median, telling_process, versions_of
from benchmarks.peers import routers
from benchmarks.peers.routers import Peer

WHAT = "requests through a router, in front of engines that cost next to nothing"
ENGINES = 2
LOADS = ((64, 0), (512, 0), (512, 50))  # requests in flight, milliseconds an engine takes
OVER_FORWARDER = {(64, 0): 20, (512, 0): 25, (512, 50): 30}
SETTLE_S = 15.0
# In the order of a round: whom to compare, side by side.
PEERS = ("forwarder", "ours", "sglang-router", "nginx", "peer")
Round = dict[str, float]


def main() -> int:
    """Measure and report."""
    parser = arguments(WHAT)
    parser.add_argument("--sglang-router", metavar="PYTHON", default=sys.executable, help="one that has it installed")
    parser.add_argument("--peer", metavar="PATH", help="a program called with PORT URL..., to be measured as well")
    parser.add_argument("--rounds", type=int, help="interleaved rounds of each (default 5, quick 1)")
    parser.add_argument("--seconds", type=float, help="of one round of one target (default 4, quick 1)")
    options = parser.parse_args()
    rounds, seconds = options.rounds or (1 if options.quick else 5), options.seconds or (1.0 if options.quick else 4.0)
    report = Report(WHAT, versions_of("uvloop", "httptools", "aiohttp", "httpx", "fastapi", "uvicorn"))
    report.counts = {"rounds": rounds, "seconds": seconds, "engines": ENGINES}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = [
            f"http://127.0.0.1:{stack.enter_context(telling_process('benchmarks.wire_engine'))[1]}"
            for _ in range(ENGINES)
        ]
        peers = _peers(stack, engines, scratch, options.sglang_router, options.peer)
        for in_flight, delay_ms in LOADS:
            _slow_down(engines, delay_ms)
            found = _rounds(peers, engines, in_flight, rounds, seconds)
            _judge(report, found, in_flight, delay_ms)
        _in_process(report, engines, rounds, seconds)
    return report.show(as_json=options.json)


def _peers(
    stack: ExitStack, engines: Sequence[str], scratch: Path, python: str, program: str | None
) -> dict[str, Peer | None]:
    most = max(in_flight for in_flight, _ in LOADS)
    peers: dict[str, Peer | None] = {
        "forwarder": stack.enter_context(routers.forwarder(engines, most, scratch)),
        "ours": stack.enter_context(routers.ours(engines, most, scratch)),
        "sglang-router": stack.enter_context(routers.sglang_router(engines, most, scratch, python)),
        "nginx": stack.enter_context(routers.nginx(engines, most, scratch)),
    }
    if program is not None:
        peers["peer"] = stack.enter_context(routers.given(program, engines, scratch))
    for peer in peers.values():
        if peer is not None:
            _await_answer(peer.url)
    return peers


def _await_answer(url: str) -> None:
    """A router may listen before it knows its engines."""
    request = urllib.request.Request(url, data=b"{}", headers={"Content-Type": "application/json"})
    deadline = time.monotonic() + SETTLE_S
    while True:
        try:
            urllib.request.urlopen(request, timeout=SETTLE_S).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _slow_down(engines: Sequence[str], delay_ms: int) -> None:
    for engine in engines:
        urllib.request.urlopen(f"{engine}/delay/{delay_ms}", timeout=SETTLE_S).close()


def _rounds(
    peers: dict[str, Peer | None], engines: Sequence[str], in_flight: int, rounds: int, seconds: float
) -> dict[str, list[Round]]:
    found: dict[str, list[Round]] = defaultdict(list)
    straight = [f"{engine}/generate" for engine in engines]
    for _ in range(rounds):
        for name, peer in peers.items():
            if peer is not None:
                found[name].append(_one(in_flight, seconds, [peer.url], peer.pid))
        found["straight"].append(_one(in_flight, seconds, straight, None))
    return found


def _one(in_flight: int, seconds: float, urls: Sequence[str], pid: int | None) -> Round:
    before = cpu_s(pid) if pid is not None else 0.0
    told = _run("benchmarks.wire_load", str(in_flight), str(seconds), *urls)
    after = cpu_s(pid) if pid is not None else 0.0
    # The load warms up for a quarter of the time; that is in the CPU time, and so in the count here.
    requests = max(told["requests"], 1) * 1.25
    return {
        "per_s": told["requests"] / told["seconds"],
        "p50_ms": told["p50_ms"],
        "p99_ms": told["p99_ms"],
        "cpu_s_per_1k": 1000 * (after - before) / requests,
        "faults": told["faults"],
    }


def _judge(report: Report, found: dict[str, list[Round]], in_flight: int, delay_ms: int) -> None:
    load = f"{in_flight}@{delay_ms}ms"
    for name in [name for name in (*PEERS, "straight") if name in found or name != "peer"]:
        report.figures[f"{load} {name}"] = _medians(found[name]) if name in found else None
    least = OVER_FORWARDER[in_flight, delay_ms]
    report.targets[f"{load} ours / forwarder, req/s"] = at_least(_ratio(found, "per_s", "forwarder"), least)
    report.targets[f"{load} ours / sglang-router, req/s"] = at_least(_ratio(found, "per_s", "sglang-router"), 1)
    report.targets[f"{load} ours / sglang-router, p99"] = at_most(_ratio(found, "p99_ms", "sglang-router"), 1)


def _ratio(found: dict[str, list[Round]], key: str, peer: str) -> float | None:
    """The median of the rounds' ratios: what else the machine does changes less within a round than over all."""
    if peer not in found:
        return None
    return median([ours[key] / theirs[key] for ours, theirs in zip(found["ours"], found[peer], strict=True)])


def _medians(rounds: list[Round]) -> Round:
    middle = {key: median([one[key] for one in rounds]) for key in rounds[0]}
    return {key: round(value, 4 if key.startswith("cpu") else 1) for key, value in middle.items()}


def _in_process(report: Report, engines: Sequence[str], rounds: int, seconds: float) -> None:
    in_flight, delay_ms = LOADS[-1]
    _slow_down(engines, delay_ms)
    found: dict[str, list[Round]] = defaultdict(list)
    for _ in range(rounds):
        for which in ("router", "aiohttp"):
            told = _run("benchmarks.in_process", which, str(in_flight), str(seconds), *engines)
            found[which].append({"per_s": told["requests"] / told["seconds"], "cpu_s_per_1k": told["cpu_s_per_1k"]})
    for name, all_ in found.items():
        report.figures[f"in process, {in_flight}@{delay_ms}ms {name}"] = _medians(all_)
    ratios = [ours["per_s"] / bare["per_s"] for ours, bare in zip(found["router"], found["aiohttp"], strict=True)]
    report.targets[f"in process, {in_flight}@{delay_ms}ms Router.post / aiohttp, req/s"] = at_least(
        median(ratios), 0.95
    )


def _run(*argv: str) -> dict[str, Any]:
    command = [sys.executable, "-m", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{argv[0]}: {done.stderr[-800:]}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


if __name__ == "__main__":
    sys.exit(main())
