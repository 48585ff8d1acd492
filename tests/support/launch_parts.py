"""Stand-ins for the parts of a launch, and a launch of them in a process of its own. Plain processes, quick to start.

The service starts a process in a session of its own, as an engine would be; torchrun starts two ranks in sessions of
their own, as the real one does. Every event is a line in `events.jsonl` of the directory that BASE names.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

ME = "tests.support.launch_parts"


def tell(event: str, **fields: Any) -> None:
    """Note an event."""
    with (Path(os.environ["BASE"]) / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "pid": os.getpid(), **fields}) + "\n")


def seen() -> dict[str, Any]:
    """What a part is told by its environment."""
    return {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "EVALFLEET_URL", "EVALFLEET_TOKEN")}


def sleeper() -> None:
    """Live until killed."""
    tell("sleeper")
    while True:
        signal.pause()


def service(port: int) -> None:
    """Answer as the service does, until SIGTERM."""
    base = Path(os.environ["BASE"])
    if os.environ.get("SERVICE") == "refuses":
        print("evalfleet: error: groups.eval.model: no such model")
        sys.exit(2)
    engine = subprocess.Popen([sys.executable, "-m", ME, "sleeper"], start_new_session=True)
    server = HTTPServer(("127.0.0.1", port), _handler(base))

    def end(*_: object) -> None:
        engine.kill()
        engine.wait()
        tell("service_ended")
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    tell("service", **seen())
    server.serve_forever()


def _handler(base: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/readyz":
                self._reply({"ok": True})
                return
            opened = base / "open"
            left = int(opened.read_text()) if opened.exists() else 0
            if left:  # one fewer at each look
                opened.write_text(str(left - 1))
                tell("looked", left=left)
            spec = {"root": "/r", "suites": ["s"]}
            view = {"run": "r", "spec": spec, "state": "active", "step": None, "progress_at": None, "created_at": 0.0}
            self._reply({**view, "points": {"running": left}, "snapshots_kept": 0, "metrics": {}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            tell("drain", on_timeout=body["on_timeout"])
            times = {"started_at": 0.0, "deadline": 0.0}
            self._reply({"drain": body["drain"], "run": "r", "open": False, "drained": False, **times})

        def _reply(self, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler


def torchrun() -> None:
    """Start two ranks and wait; the exit code of the first that failed."""
    tell("torchrun", **seen())
    command = [sys.executable, "-m", ME, "rank"]
    ranks = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}, start_new_session=True) for rank in range(2)
    ]
    codes = [rank.wait() for rank in ranks]
    sys.exit(next((code if code > 0 else 128 - code for code in codes if code), 0))


def rank() -> None:
    """Do what RANKS says: `end:CODE`, or `train` until SIGTERM, and then drain for a while."""
    number, what = os.environ["RANK"], os.environ.get("RANKS", "end:0")
    stop: list[int] = []  # not an event, whose lock the interrupted thread may hold
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    tell("rank", rank=number, **seen())
    if what.startswith("end:"):
        sys.exit(int(what.removeprefix("end:")) if number == "0" else 0)
    while not stop:
        time.sleep(0.02)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if number == "0":
        tell("draining")
        time.sleep(float(os.environ.get("DRAIN_S", "0.3")))
        tell("drained")
        sys.exit(143)


def launch(base: Path, plan: dict[str, Any]) -> int:
    """A launch of stand-ins; `plan` says {facts, gpus, engines}."""
    from eval_service.fleet_config import FleetConfig
    from eval_service.launch.facts import RunFacts
    from eval_service.launch.layout import lay_out
    from eval_service.launch.plan import LaunchPlan, Service
    from eval_service.launch.processes import Part
    from eval_service.launch.run import run_launch

    group = {"model": "/m", "num_engines": plan["engines"], "grade": "sglang" if plan["gpus"] else "fake"}
    table = {"service": {"roots": ["/r"], "state_dir": str(base)}, "groups": {"eval": group}}
    fleet = FleetConfig.model_validate(table)
    facts = RunFacts.model_validate(plan["facts"])
    layout = lay_out(facts, fleet, [str(number) for number in range(plan["gpus"])])
    found = Service(base / "fleet.toml", base / "suites.toml", fleet, "127.0.0.1", 0) if facts.has_engines else None

    def start(name: str, arguments: Any, **options: Any) -> Part:
        role = ["service", arguments[-1]] if name == "service" else ["torchrun"]
        tell("start", part=name, arguments=list(arguments))
        return Part.start(name, [ME, *role], **options)

    return run_launch(LaunchPlan(facts, layout, found, ("--config", "run.toml")), start, linger_s=1.0)


def main() -> int:
    """One of the roles."""
    role, *rest = sys.argv[1:]
    if role == "launch":
        return launch(Path(rest[0]), json.loads(rest[1]))
    if role == "service":
        service(int(rest[0]))
    {"torchrun": torchrun, "rank": rank, "sleeper": sleeper}[role]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
