"""A launch under way: the service, then the trainer, then both ended in order.

Invariants: nothing in evaluation ends the training, so a service that dies is told of and training goes on; whatever
happens, nothing that was started is left when this returns. The first SIGTERM or SIGINT lets the trainer finish its
step and drain, a second one ends it without, and the service ends after it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Protocol

from eval_service import orphans
from eval_service.access.config import Scope, TokenConfig
from eval_service.access.keyring import HASHED, plain_tokens
from eval_service.contract.client import EvalClient
from eval_service.contract.errors import ConfigError, EvalfleetError, Unavailable
from eval_service.contract.states import PointState
from eval_service.contract.token import VARIABLE, given_token
from eval_service.contract.wire import EngineState, OnTimeout
from eval_service.fleet_config import EVAL_GROUP
from eval_service.launch.layout import VISIBLE
from eval_service.launch.plan import LaunchPlan, Service
from eval_service.launch.processes import Part, send
from eval_service.ports import free_port
from eval_service.waking import Wake

LOOK_S = 0.2
READY_TIMEOUT_S = 180.0
STOP_GRACE_S = 60.0  # at least
SHUTDOWN_S = 25.0  # of Ray, after an orderly stop
LINGER_S = 15.0
_UNDER_WAY = (PointState.QUEUED, PointState.PINNING, PointState.RUNNING, PointState.SCORING)


def say(line: str) -> None:
    """To whoever watches; stdout is the trainer's."""
    print(f"evalfleet: {line}", file=sys.stderr, flush=True)


class Starter(Protocol):
    """Starts a part; `Part.start` does, and tests put their own parts in its place."""

    def __call__(
        self, name: str, arguments: Sequence[str], *, env: Mapping[str, str], output: IO[bytes] | None = None
    ) -> Part: ...


def run_launch(plan: LaunchPlan, start: Starter = Part.start, *, linger_s: float = LINGER_S) -> int:
    """Run it to its end; returns the trainer's exit code, 128 + n if a signal n ended it.

    Args:
        linger_s: how long what a dead part left may take to end by itself.

    Raises:
        ConfigError: the port is taken.
        Unavailable: the service did not come up, so that nothing was trained.
    """
    orphans.adopt()
    launch = Launch(plan, start, linger_s=linger_s)
    with launch.signals.installed():
        try:
            return launch.run()
        finally:
            launch.end()


class Signals:
    """How often this process was asked to end."""

    def __init__(self) -> None:
        self.count = 0
        self.number = 0
        self._wake = Wake()

    def pause(self, seconds: float) -> None:
        """Wait, or until a signal comes."""
        self._wake.wait(seconds)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Count them instead of dying of them; a closed terminal is one too, unless nohup has had it ignored."""

        def handle(number: int, _: object) -> None:
            self.count += 1
            self.number = number
            self._wake.ring()

        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(slots=True)
class Launch:
    """One launch; `clock` is monotonic."""

    plan: LaunchPlan
    start: Starter
    signals: Signals = field(default_factory=Signals)
    clock: Callable[[], float] = time.monotonic
    service: Part | None = None
    trainer: Part | None = None
    linger_s: float = LINGER_S
    died_at: float | None = None  # when the service was seen to have ended before the trainer
    swept: bool = False
    url: str | None = None
    token: str | None = field(default=None, repr=False)  # ours and the trainer's

    def run(self) -> int:
        """Start both, and stay until the trainer has ended; then see to what it has left."""
        if self.plan.service is not None:
            self._start_service(self.plan.service)
        if self.signals.count == 0:
            self.trainer = self._start_trainer()
            code = self._watch(self.trainer)
            self._end_ranks(self.trainer)
            self._settle()
            return code
        return 128 + self.signals.number

    def end(self) -> None:
        """End whatever still runs, the trainer first."""
        for part in (self.trainer, self.service):
            if part is not None:
                self._end(part)

    # --- the service

    def _start_service(self, service: Service) -> None:
        service = _with_free_port(service)
        self.url = service.url
        log = service.fleet.service.state_dir / "logs" / "service.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        say(f"starting the service at {service.url}; its log: {log}")
        files = ["--fleet", str(service.fleet_path), "--suites", str(service.suites_path)]
        with log.open("ab") as output:
            self.service = self.start(
                "service",
                ["eval_service.cli.main", "serve", *files, "--port", str(service.port)],
                env={VISIBLE: ",".join(self.plan.layout.fleet_gpus)},
                output=output,
            )
        self.token = _token_for(service.fleet.tokens)
        with EvalClient(service.url, token=self.token) as client:
            self._await_service(client, self.service, log)
            if self.plan.shares:
                self._await_engines(client, service)

    def _await_service(self, client: EvalClient, part: Part, log: Path) -> None:
        until = self.clock() + READY_TIMEOUT_S
        while self.signals.count == 0:
            if not part.running:
                code = part.process.returncode
                raise Unavailable(f"the service ended with {code} before it was ready: {_tail(log)}", hint=f"see {log}")
            with suppress(Unavailable):
                if client.ready().ok:
                    return
            if self.clock() > until:
                raise Unavailable(f"the service was not ready after {READY_TIMEOUT_S:.0f} s", hint=f"see {log}")
            self.signals.pause(LOOK_S)

    def _await_engines(self, client: EvalClient, service: Service) -> None:
        """On a shared GPU the engines take their share first: they measure what is free."""
        wanted = sum(slot.group == EVAL_GROUP for slot in self.plan.layout.engines)
        wanted = min(wanted, service.fleet.groups[EVAL_GROUP].desired)
        say(f"the GPU is shared: training begins once {wanted} engines have their memory")
        until = self.clock() + service.fleet.groups[EVAL_GROUP].start_timeout_s
        while self.signals.count == 0 and self.service is not None and self.service.running:
            with suppress(EvalfleetError):
                engines = [engine for group in client.fleet().groups for engine in group.engines]
                if sum(engine.state is EngineState.READY for engine in engines) >= wanted:
                    return
            if self.clock() > until:
                say("the engines are not there yet; training begins all the same")
                return
            self.signals.pause(LOOK_S)

    # --- the trainer

    def _start_trainer(self) -> Part:
        facts = self.plan.facts
        elastic = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={facts.ranks}"]
        env = {
            VISIBLE: ",".join(self.plan.layout.trainer_gpus),
            # As long as a drain takes, where one rank has died and the first is still waiting for its points.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(facts.drain_timeout_s + LINGER_S)),
            "EVALFLEET_URL": self.url or "",
            **({VARIABLE: self.token} if self.token else {}),
        }
        say(f"starting the trainer: {facts.plan}")
        return self.start("trainer", ["trainer.ranks", *elastic, "-m", "trainer.main", *self.plan.trainer], env=env)

    def _watch(self, trainer: Part) -> int:
        """Wait for the trainer's end, and pass signals on to its ranks."""
        told: dict[int, int] = {}
        while trainer.running:
            self._pass_on(trainer, told)
            self._see_to_service()
            orphans.bury({part.process.pid for part in (self.trainer, self.service) if part is not None})
            self.signals.pause(LOOK_S)
        code = trainer.process.returncode
        return code if code >= 0 else 128 - code

    def _see_to_service(self) -> None:
        """Where it has died training goes on; what it left on the GPUs gets a while to end by itself."""
        if self.service is None or self.service.running:
            return
        if self.died_at is None:
            self.died_at = self.clock()
            say(f"the service has ended with {self.service.process.returncode}; training goes on, unevaluated")
        elif not self.swept and self.clock() - self.died_at > self.linger_s:
            left = self.service.left()
            send(left, signal.SIGKILL)
            self.swept = not left

    def _pass_on(self, trainer: Part, told: dict[int, int]) -> None:
        """Each rank gets SIGTERM as often as we were asked to end; torchrun would kill them after a while."""
        if self.signals.count == 0:
            return
        ranks = trainer.children()
        if not ranks and not told:  # it has not come to starting them
            trainer.send(signal.SIGTERM)
        for rank in ranks:
            while told.setdefault(rank.pid, 0) < self.signals.count:
                told[rank.pid] += 1
                send([rank], signal.SIGTERM)

    def _end_ranks(self, trainer: Part) -> None:
        """Where torchrun was killed its ranks go on: they get their drain, as at any other end."""
        if left := trainer.left():
            say("torchrun has died; its ranks are asked to end")
            send(left, signal.SIGTERM)
            self._await_none(trainer, self.plan.facts.drain_timeout_s + LINGER_S, stops=True)

    # --- the end

    def _settle(self) -> None:
        """What becomes of points that have not ended, as `eval.on_timeout` says; not where we were asked to end."""
        if self.url is None or self.service is None or not self.plan.facts.evaluates:
            return
        with EvalClient(self.url, token=self.token) as client, suppress(EvalfleetError):
            if self.plan.facts.on_timeout is OnTimeout.ABORT and self.service.running:
                client.drain(self.plan.facts.run, timeout_s=0.0, on_timeout=OnTimeout.ABORT)
            else:
                self._await_points(client, self.service)

    def _await_points(self, client: EvalClient, service: Part) -> None:
        assert self.plan.service is not None
        until = self.clock() + self.plan.service.fleet.service.point_timeout_s
        told = False
        while self.signals.count == 0 and service.running and self.clock() < until:
            under_way = self._under_way(client)
            if under_way == 0:
                return
            if under_way and not told:
                told = True
                say(f"{under_way} points are still under way; the service ends after them (Ctrl-C: now)")
            self.signals.pause(1.0)

    def _under_way(self, client: EvalClient) -> int | None:
        """Points of the run that may still end; None while the service can't say."""
        try:
            counts = client.run(self.plan.facts.run).points
        except Unavailable:
            return None
        return sum(counts.get(state, 0) for state in _UNDER_WAY)

    def _end(self, part: Part) -> None:
        part.send(signal.SIGTERM)
        service = self.plan.service
        stop_s = service.fleet.service.stop_s + SHUTDOWN_S if service is not None else 0.0
        until = self.clock() + max(STOP_GRACE_S, stop_s)
        while part.running and self.clock() < until:
            part.wait(LOOK_S)
        part.send(signal.SIGKILL)
        part.wait(LINGER_S)
        for _ in range(4):  # and what one of them starts while it is being killed
            if self._await_none(part, self.linger_s):
                break
            send(part.left(), signal.SIGKILL)

    def _await_none(self, part: Part, timeout_s: float, *, stops: bool = False) -> bool:
        """Wait until a part has no process left; whether that is so. `stops`: only until we are asked once more."""
        until, asked = self.clock() + timeout_s, self.signals.count
        while part.left():
            if self.clock() > until or (stops and self.signals.count > asked):
                return False
            self.signals.pause(LOOK_S)
        return True


def _token_for(configs: Mapping[str, TokenConfig]) -> str | None:
    """The environment's token, else the first of the fleet file's own that may dispatch.

    Raises:
        ConfigError: the service wants a token, and there is none to bring.
    """
    if (token := given_token()) is not None or not configs:
        return token
    for name, config in configs.items():
        if config.scope.reaches(Scope.DISPATCH):
            for text in plain_tokens(name, config, os.environ):
                if not text.startswith(HASHED):
                    return text
    hint = f"put one that may dispatch into {VARIABLE}, or give fleet.toml one in plain text"
    raise ConfigError("the service wants a token, and the launch has none", field="tokens", hint=hint)


def _with_free_port(service: Service) -> Service:
    """See that the port is free; a service that is there already would answer in the place of ours.

    Raises:
        ConfigError: it is not.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((service.host, service.port or free_port(service.host)))
        except OSError as exc:
            raise ConfigError(
                f"{service.host}:{service.port} can't be listened on: {os.strerror(exc.errno or 0)}",
                field="service.port",
                hint="end what is there, or name another with --port (0: a free one)",
            ) from exc
        return replace(service, port=int(probe.getsockname()[1]))


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
