"""Verdicts of a frozen group's model on a point's outputs, through the router like any other request.

Invariant: whatever goes wrong with a verdict is its sample's error. Engines may come and go meanwhile; with none there
a verdict waits, until its own deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from eval_service.controller.fleet import Fleet
from eval_service.suites.generation import SampleFault, UnusableAnswer, parse_answer
from eval_service.suites.scorer_config import Judge
from router.errors import RouterError
from router.router import Router
from router.upstream import Upstream

_LOOK_S = 0.5
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge said; or the error that there was in its place."""

    text: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Judges:
    """The frozen groups, asked for one point."""

    fleet: Fleet
    router: Router
    point: str

    async def verdicts(self, judge: Judge, asked: Sequence[str]) -> list[Verdict]:
        """One for each prompt, in their order."""
        target = f"judge-{self.point}"
        self.router.set_target(target, self._engines(judge.group))
        looking = asyncio.create_task(self._keep_up(target, judge.group))
        room = asyncio.Semaphore(_AT_ONCE)
        try:
            return await asyncio.gather(*(self._verdict(target, judge, prompt, room) for prompt in asked))
        finally:
            looking.cancel()
            self.router.drop_target(target, abort=True)  # before the wait, in which this task may be cancelled
            await asyncio.gather(looking, return_exceptions=True)

    async def _verdict(self, target: str, judge: Judge, prompt: str, room: asyncio.Semaphore) -> Verdict:
        request = {
            "text": prompt,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": judge.max_new_tokens},
        }
        try:
            async with room:
                answer = await self.router.post(target, "/generate", request, timeout_s=judge.timeout_s)
            generated = parse_answer(answer.status, answer.body)
        except (RouterError, SampleFault, UnusableAnswer) as exc:
            return Verdict("", f"the judge did not answer: {exc}")
        self.fleet.throughput.note(answer.upstream, generated.output_tokens)
        return Verdict(generated.output)

    async def _keep_up(self, target: str, group: str) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            now = {upstream.id: upstream for upstream in self._engines(group)}
            for gone in set(self.router.stats().targets[target].upstreams) - now.keys():
                self.router.remove(target, gone, abort=True)
            for upstream in now.values():
                self.router.add(target, upstream)

    def _engines(self, group: str) -> list[Upstream]:
        return [
            Upstream(
                engine.id,
                engine.report.url or "",
                {"authorization": f"Bearer {engine.report.api_key}"} if engine.report.api_key else {},
            )
            for engine in self.fleet.engines.values()
            if engine.report.group == group and engine.ready and engine.report.url
        ]
