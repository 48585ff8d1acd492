"""What an engine's replica does, without Ray: keep one server alive, poll the controller, run its commands.

Three tasks: `_keep_alive` boots the server and boots it again when it ends or hangs; `_poll` tells the controller and
takes commands; `_work` runs them, one at a time. Serving goes on while no controller can be reached. A server that
can't be started twice in a row is fatal: `check_health` raises, and whoever placed the replica replaces it.

Invariants: a command of a lower epoch than the highest seen is refused; a command's result is told in every report
until a poll that carried it returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from eval_service.contract.errors import ConfigError
from eval_service.contract.wire import EngineState
from eval_service.engine.ending import unless_it_ends
from eval_service.engine.errors import BootFailed, EngineError, EngineFatal
from eval_service.engine.nearby import near
from eval_service.engine.pin import Clock, PinFailed, SystemClock
from eval_service.engine.protocol import (
    IDLE_POLL_S,
    Command,
    CommandKind,
    CommandResult,
    ControllerLink,
    EngineReport,
    PinError,
    PinOrder,
    remembered,
)
from eval_service.engine.server import BootOptions, Server, boot_server
from eval_service.fleet_config import GroupConfig
from eval_service.objects.places import Places

Boot = Callable[[GroupConfig, BootOptions, Clock], Awaitable[Server]]
_log = logging.getLogger(__name__)
_MAX_BOOT_FAILURES = 2
_MAX_BACKOFF_S = 2.0
_DYING_S = 8.0  # SGLang's parent ends about 5 s after its scheduler


@dataclass(frozen=True, slots=True)
class RunnerTimes:
    """How patient a runner is; seconds."""

    poll_timeout_s: float = IDLE_POLL_S + 10.0  # of one poll; then the link counts as down
    backoff_s: float = 0.2  # after a failed poll, doubled up to 2 s
    health_period_s: float = 5.0
    hung_s: float = 60.0  # without progress; then the server is started anew


class EngineRunner:
    """Owns one engine.

    Args:
        engine_id: unique in the service.
        group_name: the group that it belongs to.
        node: where it runs, as the controller should show it.
        link: how the controller is reached; whatever it raises, serving goes on.
        boot: starts a server; tests start one in their own process.
    """

    def __init__(
        self,
        engine_id: str,
        group_name: str,
        group: GroupConfig,
        *,
        node: str,
        options: BootOptions,
        link: ControllerLink,
        times: RunnerTimes | None = None,
        clock: Clock | None = None,
        boot: Boot = boot_server,
        places: Places | None = None,
    ) -> None:
        self._boot = boot
        self._places = places or Places()
        self.engine_id = engine_id
        self._group_name = group_name
        self._group = group
        self._node = node
        self._options = options
        self._link = link
        self._times = times or RunnerTimes()
        self._clock = clock or SystemClock()
        self._server: Server | None = None
        self._doomed: Server | None = None  # it is being ended, which `stop` may cut short
        self._state = EngineState.STARTING
        self._detail: str | None = None
        self._restarts = 0
        self._proven: tuple[PinOrder, ...] = ()  # by canaries, the last one first; outlives servers, and controllers
        self._leaving = False
        self._fatal: str | None = None
        self._changed = asyncio.Event()
        self._up = asyncio.Event()
        self._restart = asyncio.Event()
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._seen: set[str] = set()
        self._taken: dict[str, None] = {}
        self._results: dict[str, CommandResult] = {}
        self._reports = 0
        self._epoch = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._released = asyncio.Event()

    # --- for whoever holds the runner

    @property
    def state(self) -> EngineState:
        """What the next report says."""
        return EngineState.LEAVING if self._leaving else self._state

    async def run(self) -> None:
        """Run until `stop`, or until the engine is fatal; then the reports go on until `stop`."""
        parts = (self._keep_alive, self._poll, self._work)
        self._tasks = [asyncio.create_task(self._guarded(part)) for part in parts]
        try:
            await self._ended.wait()
        finally:
            await self._end_tasks()

    def leave(self) -> None:
        """Say that it is about to end: it is given nothing more, and serving goes on until `stop`."""
        self._leaving = True
        self._changed.set()

    async def hand_over(self, timeout_s: float) -> None:
        """Leave, and wait until the controller has nothing more for it, or the time is up."""
        self.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._released.wait()

    async def stop(self) -> None:
        """End the server's process group and the tasks; bounded, and harmless when repeated."""
        self._leaving = True
        self._ended.set()
        await self._end_tasks()
        servers = (self._server, self._doomed)
        self._server = self._doomed = None
        for server in servers:
            if server is not None:
                await server.stop()

    async def check_health(self) -> None:
        """Return while this replica can keep an engine.

        Raises:
            EngineFatal: it can't; replace it.
        """
        if self._fatal is not None:
            raise EngineFatal(self._fatal)

    def report(self) -> EngineReport:
        """What a poll tells."""
        server = self._server
        self._reports += 1
        return EngineReport(
            engine=self.engine_id,
            group=self._group_name,
            node=self._node,
            state=self.state,
            replica_pid=os.getpid(),
            nonce=server.nonce if server else None,
            detail=self._fatal or self._detail,
            url=server.url if server else None,
            api_key=server.keys.api if server else None,
            server_pid=server.process.server_pid if server else None,
            supervisor_pid=server.process.supervisor_pid if server else None,
            vocab_size=server.model.vocab_size if server else None,
            context_length=server.model.context_length if server else None,
            weight_version=server.weight_version if server else None,
            restarts=self._restarts,
            recalls=bool(self._proven),
            number=self._reports,
            taken=tuple(self._taken),
            results=tuple(self._results.values()),
        )

    # --- the server

    async def _keep_alive(self) -> None:
        failures = 0
        while True:
            try:
                server = await self._boot(self._group, self._options, self._clock)
            except ConfigError as exc:
                raise EngineFatal(str(exc)) from exc
            except (BootFailed, OSError) as exc:
                failures += 1
                _log.warning("engine %s did not start: %s", self.engine_id, exc)
                if failures >= _MAX_BOOT_FAILURES:
                    raise EngineFatal(f"the server could not be started {failures} times: {exc}") from exc
                self._become(EngineState.RESTARTING, str(exc))
                continue
            failures = 0
            self._server = server
            self._restart.clear()
            self._up.set()
            self._become(EngineState.READY, None)
            try:
                why = await self._watch(server)
                _log.warning("engine %s: %s", self.engine_id, why)
                self._restarts += 1
                self._become(EngineState.RESTARTING, why)
            finally:
                self._up.clear()
                self._server, self._doomed = None, server
                await server.stop()
                self._doomed = None

    async def _watch(self, server: Server) -> str:
        """Return, with the reason, once the server has to be started anew."""
        health = asyncio.create_task(self._health(server))
        exited = asyncio.create_task(server.process.exited.wait())
        restart = asyncio.create_task(self._restart.wait())
        try:
            await asyncio.wait((health, exited, restart), return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return f"the server ended with {server.process.exit_code}"
            return "a restart was asked for" if restart.done() else health.result()
        finally:
            for task in (health, exited, restart):
                task.cancel()

    async def _health(self, server: Server) -> str:
        """Return once the server has made no progress for `hung_s`. A command in progress is not looked into."""
        well = self._clock.monotonic()
        while self._clock.monotonic() - well < self._times.hung_s:
            await self._clock.sleep(self._times.health_period_s)
            if self._state is EngineState.PINNING:
                # A pin has deadlines of its own, and a health check's token would share a batch with its canary.
                well = self._clock.monotonic()
                continue
            with contextlib.suppress(EngineError):
                await server.api.health(timeout_s=self._times.hung_s)
                well = self._clock.monotonic()
                if await self._holds_another(server):
                    return "somebody else loaded other weights, or started it anew"
        return f"no progress for {self._times.hung_s:g} s"

    async def _holds_another(self, server: Server) -> bool:
        """Whether an engine that is not ours tells another label than the one that was pinned here."""
        wanted = server.weight_version
        if server.ours or wanted is None:
            return False
        info = await server.api.model_info(timeout_s=self._times.hung_s)
        unchanged = server.weight_version == wanted and self._state is not EngineState.PINNING
        return unchanged and info.get("weight_version") != wanted

    # --- the controller

    async def _poll(self) -> None:
        """Poll for ever; a change is told at once, beside the poll that still waits."""
        polls: set[asyncio.Task[float]] = set()
        changed: asyncio.Task[bool] | None = None
        backoff_s = 0.0
        try:
            while True:
                if not polls or (changed is not None and changed.done()):
                    await self._clock.sleep(backoff_s)
                    self._changed.clear()
                    polls.add(asyncio.create_task(self._poll_once(backoff_s)))
                    changed = asyncio.create_task(self._changed.wait())
                assert changed is not None
                done, _ = await asyncio.wait({*polls, changed}, return_when=asyncio.FIRST_COMPLETED)
                for task in done & polls:
                    polls.discard(task)
                    backoff_s = task.result()
                if not polls and not changed.done():
                    changed.cancel()
        finally:
            for task in (*polls, *((changed,) if changed else ())):
                task.cancel()

    async def _poll_once(self, backoff_s: float) -> float:
        """One poll; how long to wait before the next one."""
        report = self.report()
        try:
            async with asyncio.timeout(self._times.poll_timeout_s):
                command = await self._link.poll(report)
        except Exception as exc:  # noqa: BLE001 - whatever the link is made of: serving goes on, and it is asked again
            _log.info("engine %s: no controller: %r", self.engine_id, exc)
            return min(_MAX_BACKOFF_S, max(self._times.backoff_s, backoff_s * 2))
        for result in report.results:
            self._results.pop(result.id, None)
        if command is not None:
            self._take(command)
        return 0.0

    def _take(self, command: Command) -> None:
        if command.id in self._seen:
            return
        self._seen.add(command.id)
        if command.epoch < self._epoch:
            self._finish(_refused(command, PinError.STALE_EPOCH, f"epoch {command.epoch}; {self._epoch} was seen"))
            return
        self._epoch = command.epoch
        self._taken[command.id] = None
        self._commands.put_nowait(command)

    # --- commands

    async def _work(self) -> None:
        while True:
            command = await self._commands.get()
            if command.epoch < self._epoch:
                result = _refused(command, PinError.STALE_EPOCH, f"epoch {command.epoch}; {self._epoch} was seen")
            else:
                result = await self._outcome(command)
            self._finish(result)

    async def _outcome(self, command: Command) -> CommandResult:
        """A command's edge: what nobody thought of fails the command, and not the engine with all that come after."""
        try:
            return await self._run_command(command)
        except Exception as exc:  # noqa: BLE001 - a command's edge: its result says so
            _log.exception("engine %s: %s", self.engine_id, command.kind)
            return _refused(command, PinError.REFUSED, f"{type(exc).__name__}: {exc}")

    async def _run_command(self, command: Command) -> CommandResult:
        if command.kind is CommandKind.LEAVE:
            self.leave()
            self._released.set()
            return CommandResult(command.id, ok=True)
        if command.kind is CommandKind.RECALL:
            return CommandResult(command.id, ok=True, recalled=self._proven)
        if command.kind is CommandKind.RESTART:
            return await self._run_restart(command)
        if command.pin is None:
            return _refused(command, PinError.REFUSED, "a pin command without a pin order")
        server = self._server
        if server is None:
            return _refused(command, PinError.DIED, self._detail or "the server is not up")
        return await self._run_pin(command, command.pin, server)

    async def _run_pin(self, command: Command, order: PinOrder, server: Server) -> CommandResult:
        server.weight_version = None
        self._become(EngineState.PINNING, None)
        try:
            async with contextlib.AsyncExitStack() as stack:
                here = await unless_it_ends(server.process, stack.enter_async_context(near(self._places, order)))
                # The pin keeps its own deadline; the second beyond it is for one that is stuck.
                pin = server.pinner.pin(here)
                evidence = await unless_it_ends(server.process, pin, timeout_s=order.timeout_s + 1.0)
        except PinFailed as exc:
            if exc.error is PinError.DIED:
                # A dropped connection comes a little before the end of the process; tell of both together.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_DYING_S):
                        await server.process.exited.wait()
            return _refused(command, exc.error, exc.detail)
        finally:
            if self._server is server:
                self._become(EngineState.READY, None)
        server.weight_version = evidence.weight_version
        if evidence.canary_diff is not None:  # what has none is proven by other engines alone, if at all
            self._proven = remembered((order, *self._proven), lambda held: held)
        return CommandResult(command.id, ok=True, evidence=evidence)

    async def _run_restart(self, command: Command) -> CommandResult:
        before = self._server
        if before is not None and not before.ours:
            return _refused(command, PinError.REFUSED, "the engine is not ours to start anew")
        self._restart.set()
        try:
            async with asyncio.timeout(2 * self._group.start_timeout_s):
                await self._new_server(before)
        except TimeoutError:
            return _refused(command, PinError.TIMEOUT, "the server did not come back")
        return CommandResult(command.id, ok=True)

    async def _new_server(self, before: Server | None) -> None:
        if before is not None:
            await before.process.exited.wait()
        while self._server is None or self._server is before:
            self._up.clear()
            await self._up.wait()

    # --- inside

    def _finish(self, result: CommandResult) -> None:
        self._taken.pop(result.id, None)
        self._results[result.id] = result
        self._changed.set()

    def _become(self, state: EngineState, detail: str | None) -> None:
        self._state = state
        self._detail = detail
        self._changed.set()

    async def _guarded(self, part: Callable[[], Awaitable[None]]) -> None:
        """A task's edge: what ends it is what `check_health` raises."""
        try:
            await part()
        except Exception as exc:  # noqa: BLE001 - a task's edge: it is recorded, told and raised by check_health
            _log.exception("engine %s: %s ended", self.engine_id, part.__name__)
            self._fatal = str(exc) or repr(exc)
            self._become(EngineState.LOST, self._fatal)

    async def _end_tasks(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _refused(command: Command, error: PinError, detail: str) -> CommandResult:
    return CommandResult(command.id, ok=False, error=error, detail=detail)
