"""The service under test: `evalfleet serve` as a child, started again after it was killed whole."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from eval_service.chaos.victims import Part, Victims
from eval_service.chaos.watch import wait_until
from eval_service.chaos.world import World
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import EvalfleetError
from eval_service.contract.wire import EngineState, EngineView
from eval_service.demo.processes import Child, DemoError
from eval_service.demo.service import HOST, wait_ready
from eval_service.scratch import Kind

START_S = 150.0
_DEAD_S = 30.0
_STARTS = 3
DISABLE = "EVALFLEET_CHAOS_DISABLE"
_SESSIONS = f"{Kind.RAY}*/session_*"
_STARTED = re.compile(r" started successfully .*\(PID: (\d+)\)")
_SABOTAGE = Path(__file__).parent / "sabotage"


@dataclass(slots=True)
class Service:
    """The child, and how it is reached."""

    world: World
    victims: Victims
    port: int
    engines: int
    scratch: Path  # its TMPDIR: what a kill leaves there is removed with it
    child: Child | None = None
    orphans: list[str] = field(default_factory=list)  # what outlived a service that was killed whole

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    def start(self, client: EvalClient) -> None:
        """As a supervisor of services does: a fault may end a start, and so may a machine that is too busy for Ray."""
        for left in reversed(range(_STARTS)):
            try:
                self._start_once(client)
                return
            except DemoError:
                if not left:
                    raise
                assert self.child is not None
                self.child.process.kill()
                self.child.process.wait()
                self.keep_ray_logs()  # the next start collects what this one left

    def _start_once(self, client: EvalClient) -> None:
        """Start it, and wait until a controller acts and the engines serve."""
        files = ["--fleet", "fleet.toml", "--suites", "suites.toml"]
        self.child = self.victims.family.start(
            "the service",
            ["eval_service.cli.main", "serve", *files, "--host", HOST, "--port", str(self.port)],
            log=self.world.logs / "service.log",
            cwd=self.world.out,
            env=self._environment(),
        )
        wait_ready(self.child, client, timeout_s=START_S)
        wait_until(lambda: self.ready_engines(client) >= self.engines, START_S)

    def kill(self, client: EvalClient) -> bool:
        """SIGKILL to the command that started everything; when all is gone, start it again."""
        assert self.child is not None
        with suppress(ProcessLookupError):  # an earlier start of it may have failed
            os.kill(self.child.process.pid, signal.SIGKILL)
        self.child.process.wait()
        ours = [Part.CONTROLLER, Part.GATEWAY, Part.PROXY, Part.REPLICA, Part.SUPERVISOR, Part.ENGINE]

        def left() -> list[str]:
            # What another fault has stopped can't end now; whether it does later is seen when all is over.
            found = [(part, process) for part in ours for process in self.victims.find(part)]
            stopped = list(self.victims.stopped)
            return [f"{part.name.lower()} {process.pid}" for part, process in found if process not in stopped]

        if not wait_until(lambda: not left(), _DEAD_S):
            self.orphans += [f"{one} outlived the service" for one in left()]
        self.keep_ray_logs()
        self.start(client)
        return True

    def views(self, client: EvalClient) -> list[EngineView]:
        """The engines as the service shows them; none while it can't."""
        with suppress(EvalfleetError):
            return [engine for group in client.fleet().groups for engine in group.engines]
        return []

    def ready_engines(self, client: EvalClient) -> int:
        """How many engines serve."""
        assert self.child is not None
        self.child.must_run()
        return sum(view.state in (EngineState.READY, EngineState.PINNING) for view in self.views(client))

    def started(self) -> set[int]:
        """The processes of replicas that have started, by Serve's log: one that hangs before that it never replaces."""
        found: set[int] = set()
        for log in self.scratch.glob(f"{_SESSIONS}/logs/serve/controller_*.log"):
            with suppress(FileNotFoundError):  # they go with the service
                found |= {int(pid) for pid in _STARTED.findall(log.read_text(errors="replace"))}
        return found

    def keep_ray_logs(self) -> None:
        """Beside its own, before they go with it: why a process of Ray's was late, or died, is told nowhere else."""
        for session in self.scratch.glob(_SESSIONS):
            if not session.is_symlink():  # `session_latest`
                with suppress(OSError):
                    into = self.world.logs / session.name
                    shutil.copytree(session / "logs", into, symlinks=True, dirs_exist_ok=True)

    def stop(self) -> list[str]:
        """SIGTERM, and what did not end by itself."""
        left = self.victims.family.end(grace_s=90.0, linger_s=20.0)
        deadline = time.monotonic() + 5.0
        while self.victims.family.members() and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _environment(self) -> Mapping[str, str]:
        # A hung controller is not killed at once here, so that it meets its successor: the epoch has to part them.
        env = {"TMPDIR": str(self.scratch), "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "0"}
        if os.environ.get(DISABLE):  # the kit's own test: a part of the service is switched off
            paths = [str(_SABOTAGE), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
            env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return env
