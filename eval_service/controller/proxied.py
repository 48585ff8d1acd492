"""A lane whose requests come from a process apart, through the proxy: lm-eval's tasks over leased, proven engines.

Invariants: each attempt has a target of its own, so that what is left of an earlier one reaches no engine; an engine
that the proxy may still send to is leased to nobody (`Board.holds`). Pins, leases, faults and ends are any lane's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from eval_service.apart.process import Apart, Ended
from eval_service.contract.states import PointState, Reason
from eval_service.controller.board import Board
from eval_service.controller.foreign import Keeper, Made, digest_now, metrics_of
from eval_service.controller.lane import Lane, Work
from eval_service.controller.outcomes import LaneEnd, LaneFault
from eval_service.controller.recording import Weights
from eval_service.fleet_config import EVAL_GROUP, FleetConfig
from eval_service.functions import SAMPLES
from eval_service.scratch import Kind, scratch
from eval_service.suites.alarms import prompt_cut
from eval_service.suites.kinds import LmEvalSuite
from router.upstream import Upstream

_READY_S = 120.0  # for its imports


@dataclass(frozen=True, slots=True)
class ProxiedParts:
    """What such lanes need beyond others. `key` is the proxy's, `slots` are requests in flight per engine."""

    board: Board
    url: str
    key: str | None = field(repr=False)
    slots: int
    logs: Path


@dataclass(frozen=True, slots=True)
class Seen:
    """An engine as the board tells of it."""

    in_flight: int
    healthy: bool


@dataclass(frozen=True, slots=True)
class SeenAll:
    """All engines of a target."""

    upstreams: dict[str, Seen]


class BoardRoute:
    """A lane's way to its engines, by the board in the place of a router of the controller's own."""

    def __init__(self, board: Board, name: str, vocab_size: int, slots: int) -> None:
        self._board, self.name, self._vocab_size, self._slots = board, name, vocab_size, slots
        self._engines: list[str] = []
        self._proofs = 0

    def set_target(self, name: str, upstreams: Collection[Upstream]) -> None:
        """Open it, without engines."""
        self._board.open(self.name, self._vocab_size)

    def add(self, name: str, upstream: Upstream) -> None:
        """A proven engine takes requests."""
        self._proofs += 1
        self._board.put(self.name, replace(upstream, proof=self._proofs))
        if upstream.id not in self._engines:
            self._engines.append(upstream.id)

    def remove(self, name: str, upstream: str, *, abort: bool = False) -> None:
        """It gets no more; what a dead one had, the proxy runs again elsewhere."""
        self._board.take(self.name, upstream)
        if upstream in self._engines:
            self._engines.remove(upstream)

    def drop_target(self, name: str, *, abort: bool = False) -> None:
        """Requests are refused from here on."""
        self._board.close(self.name)
        self._engines.clear()

    @property
    def demand(self) -> int:
        """Requests in flight or waiting."""
        return self._board.demand(self.name)

    def stats(self) -> SeenAll:
        """Requests are counted as filling one engine after the other: the last ones are idle first."""
        return SeenAll(
            {
                id_: Seen(max(0, min(self._slots, self.demand - number * self._slots)), not self._board.ejected(id_))
                for number, id_ in enumerate(self._engines)
            }
        )


@dataclass(slots=True)
class Requests:
    """How far the process has come; it knows how many requests there are only as it asks them."""

    route: BoardRoute
    total: int = 0
    made: int = 0
    over: bool = False

    @property
    def unanswered(self) -> int:
        """At least one, until it has ended."""
        return 0 if self.over else max(1, self.total - self.made)

    @property
    def unsent(self) -> int:
        """Those that no engine works on."""
        busy = sum(seen.in_flight for seen in self.route.stats().upstreams.values())
        return 0 if self.over else max(0, self.total - self.made - busy)

    @property
    def all_made(self) -> bool:
        """Whether nothing is left to send."""
        return self.unsent == 0


@dataclass(slots=True, eq=False)
class ProxiedLane(Lane):
    """One attempt at lm-eval's tasks."""

    tasks: LmEvalSuite = field(kw_only=True)
    proxied: ProxiedParts = field(kw_only=True)
    _requests: Requests = field(init=False)
    _board_route: BoardRoute = field(init=False)

    def _work(self) -> Work:
        name = f"{self.point.id}.{self.number}"
        self._route = self._board_route = BoardRoute(
            self.proxied.board, name, self.point.vocab_size, self.proxied.slots
        )
        self._requests = Requests(self._board_route)
        return self._requests

    async def _attempt(self) -> None:
        log = self.proxied.logs / f"lm-eval-{self.point.id}-{self.number}.log"
        with scratch(Kind.ATTEMPT) as directory:
            process = await Apart.start("eval_service.apart.lm_eval_worker", log)
            try:
                async with self.parts.places.near(self.point.snapshot, self.point.digest) as place:
                    made = await self._evaluated(process, directory, place)
            finally:
                await process.end()
            self._close()
            await self._advance(PointState.SCORING)
            keeper = Keeper(self.point, self.number, self.tasks, self.parts.moves, self.parts.ledger)
            await keeper.record(made)

    async def _evaluated(self, process: Apart, directory: Path, snapshot: Path) -> Made:
        began = self.parts.clock()
        await self._first.wait()
        self._timings["pin_s"] = self.parts.clock() - began
        await self._advance(PointState.RUNNING)
        began = self.parts.clock()
        async with asyncio.timeout(_READY_S):
            await self._told(process)
        asked = await digest_now(self.tasks)
        await process.ask(**self._order(directory, snapshot))
        while "metrics" not in (told := await self._told(process)):
            self._requests.total, self._requests.made = told["total"], told["made"]
            self._answered(told["seconds"] or None)
        self._requests.over = True
        self._timings["generate_s"] = self.parts.clock() - began
        weights = Weights(self.pinner.order.weight_version, self.pinner.proof())
        if (after := await digest_now(self.tasks)) != asked:  # which of the two was read, nobody knows
            asked = xxhash.xxh3_128_hexdigest(f"{asked}{after}{self._board_route.name}".encode())
        metrics, alarms = metrics_of(told["metrics"]), prompt_cut(**told["cuts"])
        return Made(metrics, directory / SAMPLES, weights, self._timings, asked, alarms)

    async def _told(self, process: Apart) -> dict[str, Any]:
        try:
            told = await process.answer()
        except Ended as exc:
            if exc.status < 0:  # somebody killed it, or memory ran out: no word on the model
                raise LaneFault("lm_eval", str(exc)) from exc
            raise LaneEnd(PointState.FAILED, Reason.CRASHED, str(exc)) from exc
        if "lost" in told:
            raise LaneFault("generation", told["lost"])
        if "crashed" in told:
            raise LaneEnd(PointState.FAILED, Reason.CRASHED, told["crashed"])
        return told

    def _order(self, directory: Path, snapshot: Path) -> dict[str, Any]:
        config = self.tasks.config
        contexts = (engine.report.context_length for engine in self.parts.fleet.leasable())
        return {
            "snapshot": str(snapshot),
            "url": f"{self.proxied.url}/lanes/{self._board_route.name}",
            "key": self.proxied.key,
            "context": min((length for length in contexts if length), default=None),
            "weight_version": self.pinner.order.weight_version,
            "scratch": str(directory),
            "path": str(self.tasks.path) if self.tasks.path else None,
            **config.model_dump(include={"tasks", "num_fewshot", "limit", "seed", "concurrency", "metric"}),
        }


def proxied_parts(config: FleetConfig, board: Board, key: str | None) -> ProxiedParts:
    """As the fleet's file has them."""
    service = config.service
    host = service.proxy_host or service.host
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    slots = config.groups[EVAL_GROUP].server_concurrency
    return ProxiedParts(board, f"http://{host}:{service.proxy_port}", key, slots, service.state_dir / "logs")
