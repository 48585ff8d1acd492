"""A whole service without Ray: a real controller over a real ledger, with fake engines behind real runners.

The engines are servers in this process, which start in no time; with `processes` they are processes, to be killed by
signals. The link between them is a direct call that a test can cut, or make lose its answers. What a fake says depends
on the bytes that it loaded, so a sample's output tells whether it was made with the point's own weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import signal
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from eval_service.contract.canary import canary_token_ids
from eval_service.contract.errors import Unavailable
from eval_service.contract.manifest import Canary, Manifest
from eval_service.contract.snapshot import SnapshotWriter
from eval_service.contract.states import ENDS, PointState
from eval_service.contract.wire import DispatchRequest, EngineState, PointView, RunSpec, SampleView
from eval_service.controller.acting import Parts
from eval_service.controller.core import Controller
from eval_service.controller.engines import Engine
from eval_service.controller.lane import Lane
from eval_service.controller.sizing import Sizes
from eval_service.engine.attached import Attachment
from eval_service.engine.fake import fake_canary
from eval_service.engine.pin import SystemClock
from eval_service.engine.protocol import Command, EngineReport
from eval_service.engine.runner import EngineRunner, RunnerTimes
from eval_service.engine.server import BootOptions, Server, boot_server
from eval_service.fleet_config import FleetConfig, GroupConfig
from eval_service.ledger.bounds import Bounds
from eval_service.ledger.database import Database
from eval_service.ledger.intents import Intents
from eval_service.ledger.lock import FileLock, lock_of
from eval_service.ledger.views import Views
from eval_service.objects.places import Places
from eval_service.suites.samples import read_samples
from eval_service.suites.scoring import Score, ScorerCall, ScorerPool
from eval_service.suites.suite import AnySuite, functions_of, load_suites
from tests.support.engine_model import VOCAB_SIZE, make_model, write_model
from tests.support.inner_engine import Gates, InnerProcess, boot_inner

# An engine that is only starved is neither hung nor lost: tests of those that are give it less.
TIMES = RunnerTimes(poll_timeout_s=5.0, backoff_s=0.05, health_period_s=0.1, hung_s=60.0)
HUNG_SOON = replace(TIMES, hung_s=2.0)
WAIT_S = 80.0  # engines, controller and test share one loop, on a machine that others load
SUITE = "words"


class Clock:
    """Unix seconds that a test may move on; they also pass by themselves."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        """Now."""
        return time.time() + self.ahead_s


@dataclass
class Link:
    """The way from the replicas to whichever controller acts now."""

    controller: Controller | None = None
    cut: set[str] = field(default_factory=set)
    open: Counter[str] = field(default_factory=Counter)  # polls that wait for their answer
    lose_answers: int = 0  # of those that carry a command
    lost: int = 0

    async def poll(self, report: EngineReport) -> Command | None:
        """As the protocol says."""
        if self.controller is None or report.engine in self.cut:
            raise Unavailable("no controller acts now")
        self.open[report.engine] += 1
        try:
            command = await self.controller.poll(report)
        finally:
            self.open[report.engine] -= 1
        if command is not None and self.lost < self.lose_answers:
            self.lost += 1
            raise Unavailable("the answer was lost")
        return command


@dataclass(frozen=True, slots=True)
class Export:
    """A published snapshot."""

    path: Path
    manifest: Manifest


class Stand:
    """See the module's docstring. Use `running`."""

    def __init__(
        self,
        root: Path,
        *,
        prompts: int | Mapping[str, int] = 8,
        sampling: str = "max_new_tokens = 16",
        oversize: int = 0,
        processes: bool = False,
        frozen: bool = False,
        times: RunnerTimes = TIMES,
        server_concurrency: int = 4,
        knobs: Mapping[str, Any] | None = None,
        more_suites: str = "",
        objects: Mapping[str, Any] | None = None,
        **service: Any,
    ) -> None:
        self.root = root
        # Such as what the session's fixtures have started; what those start is theirs, as a database's workers are.
        self._others = set(psutil.Process().children())
        self._times = times
        self._processes = processes
        self._gates: defaultdict[str, Gates] = defaultdict(Gates)
        self.runs = root / "runs"
        self.runs.mkdir()
        make_model(root / "boot", seed=0)
        sizes = {SUITE: prompts} if isinstance(prompts, int) else prompts
        file = self._write_suites(sizes, sampling, oversize)
        file.write_text(file.read_text() + more_suites)
        self.suites: dict[str, AnySuite] = load_suites(file)
        self.clock = Clock()
        self.url = f"sqlite:///{root / 'ledger.db'}"
        group = {
            "model": root / "boot",
            "grade": "fake",
            "num_engines": (0, 8),
            "server_concurrency": server_concurrency,
            "start_timeout_s": 60,
            "overrides": {**(knobs or {})},
        }
        settings = {"scan_interval_s": 3600, "engine_lost_s": 30.0, "roots": (root,), "handover_s": 0.5}
        settings |= {"state_dir": root / "state", **service}
        groups = {"eval": group, **({"judge": {**group, "kind": "frozen"}} if frozen else {})}
        self.config = FleetConfig.model_validate({"service": settings, "groups": groups, "objects": objects})
        self.database = Database(self.url, clock=self.clock)
        bounds = replace(Bounds.of(self.config, self.suites.keys(), functions_of(self.suites)), roots=(root.resolve(),))
        self.intents = Intents(self.database, bounds)
        self.views = Views(self.database, version="test")
        self.link = Link()
        self.exports: dict[str, Export] = {}
        self._scoring = asyncio.Event()
        self.runners: dict[str, EngineRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def _write_suites(self, prompts: Mapping[str, int], sampling: str, oversize: int) -> Path:
        """One suite for each name, of so many prompts, the first of them too long for the model."""
        tables = []
        for name, count in prompts.items():
            texts = (f"p{number}" + "x" * 999 * (number < oversize) for number in range(count))
            rows = (json.dumps({"prompt": text, "answer": f"a{number}"}) for number, text in enumerate(texts))
            (self.root / f"{name}.jsonl").write_text("\n".join(rows))
            tables.append(
                f"[suites.{name}]\nsampling = {{ {sampling} }}\n"
                f'datasets = [{{ name = "all", path = "{name}.jsonl" }}]\n'
            )
        file = self.root / "suites.toml"
        file.write_text("\n".join(tables))
        return file

    # --- its parts

    @asynccontextmanager
    async def running(self, engines: int = 1, **knobs: Any) -> AsyncIterator[Stand]:
        """A controller and engines; whatever happens, nothing is left of them."""
        try:
            self.start_controller()
            for number in range(engines):
                self.start_engine(f"e{number}", **knobs)
            yield self
        finally:
            await self.close()

    async def close(self) -> None:
        """End everything."""
        self.release()
        if self.link.controller is not None:
            self.link.controller.stop()
        await asyncio.gather(*(runner.stop() for runner in self.runners.values()))
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.database.close()
        left = set(psutil.Process().children()) - self._others
        assert not left, left

    def hold_answers(self, *names: str) -> None:
        """Let none of these engines answer a sample until `release`, whether they run yet or not; their pins go on."""
        for name in names:
            self._gates[name].answers.clear()

    def hold_updates(self, *names: str) -> None:
        """Let none of these engines load anything until `release`."""
        for name in names:
            self._gates[name].updates.clear()

    def release(self, *names: str) -> None:
        """Let these engines go on, by default all."""
        for name in names or tuple(self._gates):
            self._gates[name].open()

    def hold_scoring(self) -> None:
        """Let no sample be scored until `release_scoring`."""
        self._scoring.clear()
        pool: ScorerPool = self.acting._lane_parts.scorers
        real = pool.score

        async def score(scorer: str | ScorerCall, outputs: Sequence[str], answers: Sequence[str]) -> list[Score]:
            await self._scoring.wait()
            return await real(scorer, outputs, answers)

        pool.score = score  # type: ignore[method-assign]

    def release_scoring(self) -> None:
        """Go on."""
        self._scoring.set()

    def steal_lock(self) -> None:
        """Leave the acting controller without the kernel's lock, unknown to it."""
        lock = self._lock
        assert isinstance(lock, FileLock)
        assert lock._handle is not None
        fcntl.flock(lock._handle, fcntl.LOCK_UN)

    def new_controller(self) -> Controller:
        """A controller that does not run yet."""
        self._lock = lock_of(self.url)
        return Controller(Parts(self.config, self.suites, self.database, self._lock))

    def start_controller(self) -> Controller:
        """The controller that the engines reach from now on."""
        controller = self.link.controller = self.new_controller()
        self._tasks[f"controller-{uuid.uuid4().hex}"] = controller_task = asyncio.create_task(controller.run())
        controller_task.set_name("controller")
        self._running = controller_task
        return controller

    async def kill_controller(self) -> None:
        """End it as a kill would: at once, in the middle of whatever it does."""
        acting = self.acting
        lanes = [lane.task for lane in acting._lanes.values() if lane.task is not None]
        self.link.controller = None
        for task in (self._running, *lanes):
            task.cancel()
        await asyncio.gather(self._running, *lanes, return_exceptions=True)

    def start_engine(self, name: str, *, group: str = "eval", **knobs: Any) -> EngineRunner:
        """One more engine."""
        config = self.config.groups[group]
        config = config.model_copy(update={"overrides": {**config.overrides, **knobs}})
        options = BootOptions(log=self.root / "logs" / f"{name}.log")
        runner = EngineRunner(
            name,
            group,
            config,
            node="here",
            options=options,
            link=self.link,
            times=self._times,
            boot=boot_server if self._processes else partial(boot_inner, gates=self._gates[name]),
            places=Places(self.config.objects, self.config.service.state_dir),
        )
        self.runners[name] = runner
        self._tasks[name] = asyncio.create_task(runner.run())
        return runner

    @asynccontextmanager
    async def somebody_elses_engine(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
        """An engine that is attached by its URL as `theirs`; its end is its owner's."""
        ours = self.config.groups["eval"]
        options = BootOptions(log=self.root / "none")
        engine = await boot_inner(ours, options, SystemClock(), gates=self._gates["theirs"])
        monkeypatch.setenv("THEIR_KEY", engine.keys.api)
        monkeypatch.setenv("THEIR_ADMIN_KEY", engine.keys.admin)
        table = {
            "kind": "attached",
            "urls": (engine.url,),
            "model": ours.model,
            "api_key_env": "THEIR_KEY",
            "admin_api_key_env": "THEIR_ADMIN_KEY",
            "server_concurrency": ours.server_concurrency,
        }
        config = GroupConfig.model_validate(table)
        await self.until(lambda: self.acting)
        groups = self.acting.fleet.groups = {**self.config.groups, "gpus-next-door": config}
        self.acting._sizes = Sizes(groups, {}, self.clock)
        link, boot = self.link, Attachment(engine.url)
        runner = EngineRunner(
            "theirs", "gpus-next-door", config, node="there", options=options, link=link, times=self._times, boot=boot
        )
        self.runners["theirs"] = runner
        self._tasks["theirs"] = asyncio.create_task(runner.run())
        try:
            yield engine
        finally:
            await runner.stop()
            await engine.process.stop()
            await engine.api.close()

    async def cut_off(self, name: str) -> None:
        """Let nothing more be heard of an engine: neither a new poll, nor one that waits for its answer."""
        self.link.cut.add(name)
        self.engine(name).touch()
        await self.until(lambda: not self.link.open[name])

    async def turn(self, name: str, **knobs: Any) -> None:
        """Turn knobs of an engine at run time."""
        server = self.runners[name]._server
        assert server is not None
        headers = {"authorization": f"Bearer {server.keys.admin}"}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{server.url}/_knobs", json=knobs, headers=headers) as answer:
                assert answer.status == 200

    def kill_server(self, name: str) -> None:
        """End an engine's server as SIGKILL does."""
        server = self.runners[name]._server
        assert server is not None
        process: Any = server.process
        if isinstance(process, InnerProcess):
            process.kill()
        else:
            os.kill(process.server_pid, signal.SIGKILL)

    # --- what is asked of it

    def export(
        self,
        run: str,
        step: int,
        *,
        seed: int | None = None,
        canary: Canary | bool | None = True,
        without: tuple[str, ...] = (),
    ) -> Export:
        """Publish a snapshot as a trainer does; its weights follow from run and step."""
        seed = seed if seed is not None else step + 1000 + sum(run.encode())
        with SnapshotWriter(self.runs, run, step, "tests 1") as writer:
            write_model(writer, seed=seed, without=without)
            wanted = canary if isinstance(canary, Canary) else None
            if canary is True:
                digest = Manifest.build(
                    run=run, step=step, files=writer.files, tensors=writer.tensors, exporter="x", canary=None
                ).tensor_digest
                wanted = fake_canary(digest, canary_token_ids(VOCAB_SIZE))
            published = writer.publish(canary=wanted, dispatch=[])
        export = self.exports[str(published.path.resolve())] = Export(published.path, published.manifest)
        return export

    def put_run(self, run: str, **spec: Any) -> None:
        """Make a run known."""
        given = {"root": str(self.runs), "suites": tuple(self.suites)[:1], "max_in_flight": 1000, **spec}
        self.intents.put_run(run, RunSpec.model_validate(given))

    def dispatch(self, run: str, step: int, export: Export | None = None, **request: Any) -> str:
        """Ask for a point; its id."""
        export = export or self.export(run, step)
        return self.dispatch_path(run, step, export.path, **{"digest": export.manifest.digest, **request})

    def dispatch_path(self, run: str, step: int, path: Path | str, **request: Any) -> str:
        """Ask for a point on a directory, whosever it is; its id."""
        given = {"run": run, "step": step, "reservation": str(uuid.uuid4()), "snapshot": str(path), **request}
        reply = self.intents.dispatch(DispatchRequest.model_validate(given))
        if self.link.controller is not None:
            self.link.controller.wake()
        return reply.points[0].id

    @property
    def acting(self) -> Any:
        """The inside of the controller that acts."""
        assert self.link.controller is not None
        acting = self.link.controller._acting
        assert acting is not None
        return acting

    def engine(self, name: str) -> Engine:
        """An engine as the controller knows it."""
        engine: Engine = self.acting.fleet.engines[name]
        return engine

    def in_flight(self, name: str) -> int:
        """Samples that an engine has, of whichever point."""
        upstream = self.acting._router.stats().upstreams.get(name)
        return upstream.in_flight if upstream is not None else 0

    def lane(self, point: str) -> Lane:
        """A point's lane."""
        lane: Lane = self.acting._lanes[point]
        return lane

    def point(self, point: str) -> PointView:
        """A point as the ledger has it."""
        return self.views.point(point)

    def samples(self, point: str) -> tuple[SampleView, ...]:
        """A done point's samples."""
        path = self.point(point).samples_path
        assert path is not None
        return read_samples(Path(path), limit=10_000).samples

    # --- waiting

    async def until(self, condition: Callable[[], Any], *, timeout_s: float = WAIT_S) -> None:
        """Return once it holds."""
        end = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(KeyError, AssertionError):
                if condition():
                    return
            if time.monotonic() > end:
                raise AssertionError(f"not within {timeout_s:g} s: {self.told()}")
            await asyncio.sleep(0.01)

    async def looked(self) -> None:
        """The controller has looked at everything once more, from the beginning to the end."""
        controller = self.link.controller
        assert controller is not None
        for _ in range(2):  # the first wake may have ended a rest, or come in the midst of a look
            controller.wake()
            await self.until(lambda: not controller._wake.is_set())

    async def until_ready(self, *names: str) -> None:
        """The engines (by default all) can be leased or are."""
        for name in names or tuple(self.runners):
            await self.until(partial(lambda name: self.engine(name).ready, name))

    async def until_state(self, point: str, *states: PointState) -> PointView:
        """The point is in one of the states."""
        await self.until(lambda: self.point(point).state in states)
        return self.point(point)

    async def until_ended(self, *points: str) -> list[PointView]:
        """All of the points have ended."""
        await self.until(lambda: all(self.point(point).state in ENDS for point in points))
        return [self.point(point) for point in points]

    async def until_done(self, *points: str) -> list[PointView]:
        """All of the points are done, each with the right samples, once."""
        ended = await self.until_ended(*points)
        for view in ended:
            assert view.state is PointState.DONE, (view.state, view.reason, view.detail)
            self.check_result(view)
        return ended

    def check_result(self, view: PointView) -> None:
        """Every sample is there once, made with the point's own weights and no others."""
        samples = self.samples(view.id)
        assert [sample.index for sample in samples] == list(range(self.suites[view.suite].size))
        assert {sample.weight_version for sample in samples} == {view.weight_version}
        digest = self.exports[view.snapshot or ""].manifest.tensor_digest
        for sample in samples:
            assert sample.output == said(digest, sample.prompt), (sample.engine, sample.index)
        assert sum(attempt.outcome == "done" for attempt in view.history) == 1
        files = list((self.runs / view.run / "evals").glob(f"*{view.id}*"))
        assert files == [Path(view.samples_path or "")]

    def told(self) -> str:
        """What there is to say of a wait that was in vain."""
        lines = [
            str((v.id[:6], v.run, v.step, v.state, v.detail, v.attempts)) for v in self.views.points(limit=50).points
        ]
        with contextlib.suppress(AssertionError):
            for engine in self.acting.fleet.engines.values():
                lines.append(str((engine.id, engine.state, engine.point, engine.quarantined, engine.sent.keys())))
            lines.append(str(self.link.controller and self.link.controller.troubles))
        return "\n".join(lines)


def said(tensor_digest: str, prompt: str) -> str:
    """What a fake that holds those tensors answers."""
    return hashlib.blake2s(f"{tensor_digest}:{prompt}".encode(), digest_size=4).hexdigest()


def ready_count(stand: Stand) -> int:
    """Engines that serve."""
    return sum(engine.state is EngineState.READY for engine in stand.acting.fleet.engines.values())
