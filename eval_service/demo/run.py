"""The demo from end to end.

Invariant: whatever happens (an error, Ctrl-C, SIGTERM), everything that was started is ended before this returns.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import typer

from eval_service.cli.progress import bar
from eval_service.cli.reading import all_points, some_samples
from eval_service.contract.client import EvalClient
from eval_service.contract.states import PointState
from eval_service.contract.wire import EngineView, PointView, SampleView
from eval_service.demo import report as reporting
from eval_service.demo import service, traces
from eval_service.demo.build import Built, build
from eval_service.demo.follow import Follower
from eval_service.demo.kill import EngineKiller, Kill, proof
from eval_service.demo.plan import RUN, DemoOptions, Plan
from eval_service.demo.plots import series_of, write_html, write_png
from eval_service.demo.processes import Child, DemoError, Family, terminable
from eval_service.demo.workspace import Workspace, fresh

READY_TIMEOUT_S = 120.0
ENGINES_TIMEOUT_S = 300.0
TRAIN_TIMEOUT_S = 900.0
HEADLINE = "exact_match"


@dataclass(slots=True)
class Seen:
    """What the live part of the demo brought home."""

    points: list[PointView] = field(default_factory=list)
    samples: dict[str, list[SampleView]] = field(default_factory=dict)
    kill: Kill | None = None
    ports: set[int] = field(default_factory=set)
    engines: list[EngineView] = field(default_factory=list)

    def point(self, point_id: str) -> PointView | None:
        """A point by its id."""
        return next((point for point in self.points if point.id == point_id), None)


@dataclass(slots=True)
class Stopwatch:
    """How long each part took, in seconds."""

    laps: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Time a part, also one that fails."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.laps[name] = time.monotonic() - begun


def run_demo(options: DemoOptions, plan: Plan | None = None) -> int:
    """Run the demo and return the exit code: 0 if everything was as it should be, 1 if not.

    Raises:
        ConfigError: the output directory is not one that may be written to.
        DemoError: a part could not start, or failed; everything is ended all the same.
    """
    with fresh(options.out) as workspace, terminable():
        return Demo(options, plan or Plan(), workspace).run()


@dataclass(slots=True)
class Demo:
    """One demo in its workspace."""

    options: DemoOptions
    plan: Plan
    workspace: Workspace
    family: Family = field(default_factory=Family)
    watch: Stopwatch = field(default_factory=Stopwatch)
    seen: Seen = field(default_factory=Seen)
    left_behind: list[str] = field(default_factory=list)

    def run(self) -> int:
        """Build, serve, train, follow, drain, end, report."""
        with self.watch.lap("total_s"):
            port = self.options.port or service.free_port()
            self.seen.ports.add(port)
            url = f"http://{service.HOST}:{port}"
            with self.watch.lap("build_s"):
                built = build(self.workspace, self.plan, url=url, port=port)
            self.say(
                f"built a model and {built.data.train_examples} conversations to train on; none of {built.disjoint} "
                "held-out prompts is among them"
            )
            try:
                with EvalClient(url) as client:
                    self._live(client, port)
            finally:
                self._end()
        return self._close(built)

    def say(self, line: str) -> None:
        """A line for whoever watches; stdout is the report's when JSON is wanted."""
        print(line, file=sys.stderr if self.options.as_json else sys.stdout, flush=True)

    def _live(self, client: EvalClient, port: int) -> None:
        server = self._serve(client, port)
        killer = EngineKiller(owns=self.family.owns, clock=time.time) if self.options.kill else None
        self.say(f"training {self.plan.num_steps} steps, points at {', '.join(map(str, self.plan.steps))}")
        with self.watch.lap("train_s"), bar("points", lines=False) as advance:
            follower = Follower(client, self.say, killer, advance, len(self.plan.steps))
            follower.follow(self._train(), server, timeout_s=TRAIN_TIMEOUT_S)
        self.seen.kill = killer.kill if killer else None
        self._collect(client)

    def _serve(self, client: EvalClient, port: int) -> Child:
        with self.watch.lap("service_start_s"):
            self.say(f"starting the service at {client.url}")
            server = service.start_service(self.family, self.workspace, port)
            service.wait_ready(server, client, timeout_s=READY_TIMEOUT_S)
        with self.watch.lap("engines_ready_s"):
            self.say(f"waiting for {self.plan.engines} SGLang engines (about half a minute)")
            count = self.plan.engines
            service.wait_engines(server, client, count, timeout_s=ENGINES_TIMEOUT_S, told=_each_new(self.say))
        self._note_ports(client)
        return server

    def _train(self) -> Child:
        arguments = ["trainer.main", "--config", str(self.workspace.config("run"))]
        return self.family.start("the trainer", arguments, log=self.workspace.log("trainer"), cwd=self.workspace.out)

    def _note_ports(self, client: EvalClient) -> None:
        urls = [engine.url for engine in service.engines(client) if engine.url]
        self.seen.ports.update(port for url in urls if (port := service.port_of(url)))

    def _collect(self, client: EvalClient) -> None:
        self._note_ports(client)
        self.seen.points = all_points(client, RUN)
        if not self.seen.points:
            raise DemoError(f"the run has no points; see {self.workspace.out / 'logs'}")
        self.seen.engines = service.engines(client)
        wanted = {point.id for point in (*self.seen.points[:1], *self.seen.points[-1:])}
        if self.seen.kill is not None:
            wanted.add(self.seen.kill.point)
        done = [point for point in self.seen.points if point.id in wanted and point.state is PointState.DONE]
        self.seen.samples = {point.id: some_samples(client, point.id) for point in done}

    def _end(self) -> None:
        with self.watch.lap("stop_s"), _uninterrupted():
            self.say("ending what was started")
            killed = self.family.end()
        self.left_behind += [f"had to be killed: {name}" for name in killed]
        self.left_behind += [f"process {process.pid}" for process in self.family.members()]
        left = [port for port in sorted(self.seen.ports) if service.listens(port) and not self._anothers(port)]
        self.left_behind += [f"port {port}" for port in left]
        self.left_behind += self.workspace.partial()

    def _anothers(self, port: int) -> bool:
        """Whether somebody else has been given a port of ours since: they are not marked, and work elsewhere."""
        found = service.listeners(port)
        return bool(found) and not any(self.family.owns(each.pid) or self._works_here(each) for each in found)

    def _works_here(self, process: psutil.Process) -> bool:
        try:
            return Path(process.cwd()).is_relative_to(self.workspace.out)
        except psutil.Error:
            return False

    def _close(self, built: Built) -> int:
        found = self._findings(built)
        checked = reporting.checks(found, self.plan)
        content = json.dumps(reporting.report(found, self.plan, checked), indent=1)
        (self.workspace.out / "report.json").write_text(content + "\n")
        self._draw(found)
        if self.options.as_json:
            typer.echo(content)
        else:
            self.say("\n" + reporting.closing_text(found, checked))
            self.say(f"\n{self.workspace.out}: report.json, curve.png, curve.html, {len(found.kept)} snapshots")
        return 0 if all(check.ok for check in checked) else 1

    def _findings(self, built: Built) -> reporting.Findings:
        first, last = self.seen.points[0], self.seen.points[-1]
        return reporting.Findings(
            points=self.seen.points,
            first_samples=reporting.some(self.seen.samples.get(first.id, [])),
            last_samples=reporting.some(self.seen.samples.get(last.id, [])),
            receipt=traces.receipt(self.workspace.train_output),
            trained_until=traces.trained_until(self.workspace.train_output),
            kill=self._proof(),
            kill_wanted=self.options.kill,
            disjoint=built.disjoint,
            engines=self.seen.engines,
            kept=self.workspace.kept(RUN),
            left_behind=self.left_behind,
            timings=self.watch.laps,
        )

    def _proof(self) -> dict[str, object] | None:
        kill = self.seen.kill
        point = self.seen.point(kill.point) if kill else None
        if kill is None or point is None:
            return None
        return proof(kill, point, self.seen.samples.get(kill.point, []), self.plan.eval_examples)

    def _draw(self, found: reporting.Findings) -> None:
        series = series_of(found.points, HEADLINE)
        killed_at = self.seen.kill.step if self.seen.kill else None
        write_png(self.workspace.out / "curve.png", series, killed_at)
        write_html(self.workspace.out / "curve.html", series, found.points, killed_at)


def _each_new(say: Callable[[str], None]) -> Callable[[int], None]:
    told = 0

    def seen(ready: int) -> None:
        nonlocal told
        if ready > told:
            told = ready
            say(f"engines ready: {ready}")

    return seen


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C does not stop what the first one began: the ending, which is bounded."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
