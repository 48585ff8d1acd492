"""Generating a point's samples through the router: every one tagged with its engine and the weights it came from.

Invariants: a sample counts only if the engine reports the pinned `weight_version` for it; else it is thrown away, the
engine is reported as useless, and the sample runs again. Waiting for an engine is no fault: samples wait for as long as
their point may take. A sample that is stuck on every engine it is given to is its own error and holds up nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from eval_service.controller.outcomes import LaneFault
from eval_service.suites.choosing import likeliest
from eval_service.suites.datasets import Prompt
from eval_service.suites.generation import (
    Generated,
    Likelihood,
    SampleFault,
    UnusableAnswer,
    likelihood_request,
    parse_answer,
    parse_likelihood,
    request_for,
    split_choice,
)
from eval_service.suites.suite import Ask, Suite
from router.errors import NoTarget, RouterError, UpstreamFailed
from router.faults import FaultKind
from router.router import Answer, Router

WORKERS = 1024  # requests that wait at the router at once; the rest are not made yet
RERUNS = 5  # of one sample, after answers that are no use


class Spoiled(Exception):
    """A sample could not be had through no fault of its own: an infrastructure fault of the whole attempt."""


def raise_fault(group: ExceptionGroup[Spoiled]) -> NoReturn:
    """As the fault of an attempt."""
    raise LaneFault("generation", str(group.exceptions[0])) from group


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of one sample: an answer, or its own error."""

    ask: Ask
    generated: Generated | None
    error: str | None
    engine: str
    latency_s: float


class Generation:
    """All samples of one attempt.

    Args:
        target: the router's target that the lane's proven engines are in.
        weight_version: what every answer must carry.
        patience_s: of one sample, waits and runs together; what bounds a run is the router's limit.
        useless: called with the id of an engine whose answer was no use, and why.
        answered: called after each sample with its seconds on an engine, None where none answered it.
        made: called with the id of an engine and the tokens of an answer of its.
    """

    def __init__(
        self,
        suite: Suite,
        router: Router,
        *,
        target: str,
        weight_version: str,
        vocab_size: int,
        patience_s: float,
        useless: Callable[[str, str], None],
        answered: Callable[[float | None], None],
        made: Callable[[str, int], None] = lambda engine, tokens: None,
    ) -> None:
        self._suite = suite
        self._router = router
        self._target = target
        self._weight_version = weight_version
        self._vocab_size = vocab_size
        self._patience_s = patience_s
        self._useless = useless
        self._answered = answered
        self._note = made
        self._asks = tuple(suite.asks())
        self._made = 0
        self._answers: dict[int, Answered] = {}

    @property
    def unanswered(self) -> int:
        """Samples that are not in yet."""
        return len(self._asks) - len(self._answers)

    @property
    def all_made(self) -> bool:
        """Whether every sample was handed to the router."""
        return self._made == len(self._asks)

    @property
    def unsent(self) -> int:
        """Samples that no engine works on."""
        gate = self._router.stats().targets.get(self._target)
        return len(self._asks) - self._made + (gate.waiting if gate else 0)

    def rendered(self, prompts: Sequence[Prompt]) -> None:
        """Ask these in the place of the suite's own, whose chat messages they have as text; before `run`."""
        self._asks = tuple(replace(ask, prompt=prompts[ask.prompt.index]) for ask in self._asks)

    async def run(self) -> list[Answered]:
        """Generate them all, in the order of their indices.

        Raises:
            ExceptionGroup: of `Spoiled`.
        """
        left = iter(self._asks)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(WORKERS, len(self._asks))):
                group.create_task(self._work(left))
        return [self._answers[ask.index] for ask in self._asks]

    async def _work(self, left: Iterator[Ask]) -> None:
        for ask in left:
            self._made += 1
            answer = await self._sample(ask)
            self._answers[ask.index] = answer
            self._answered(answer.latency_s if answer.generated else None)

    async def _sample(self, ask: Ask) -> Answered:
        try:
            if ask.prompt.choices:
                return await self._choose(ask)
            request = request_for(ask.prompt, self._suite.sampling, seed=ask.seed, vocab_size=self._vocab_size)
            answer, generated = await self._asked(request)
        except SampleFault as exc:
            return Answered(ask, None, str(exc), "", 0.0)
        except _Refused as exc:
            return Answered(ask, None, str(exc), exc.engine, exc.latency_s)
        return Answered(ask, generated, None, answer.upstream, answer.latency_s)

    async def _choose(self, ask: Ask) -> Answered:
        """The context first, whose length in tokens says where a choice begins; it is cached for the choices, too."""
        prompt = ask.prompt
        context, _ = split_choice(prompt.text, "")
        first, of_context = await self._asked(likelihood_request(context, None))
        length = of_context.prompt_tokens
        found = [await self._likelihood(split_choice(prompt.text, choice)[1], length) for choice in prompt.choices]
        logprobs = tuple(logprob for logprob, _ in found)
        chosen = Generated(
            output=likeliest(prompt.choices, logprobs),
            finish_reason="stop",
            prompt_tokens=length,
            output_tokens=0,
            weight_version=self._weight_version,
            likelihoods=logprobs,
        )
        return Answered(ask, chosen, None, first.upstream, first.latency_s + sum(spent for _, spent in found))

    async def _likelihood(self, text: str, length: int) -> tuple[float, float]:
        """A choice's log-likelihood, and its seconds on an engine."""
        request = likelihood_request(text, length)
        answer, generated = await self._asked(request, lambda body, made: parse_likelihood(body, made, length))
        assert generated.logprob is not None
        return generated.logprob, answer.latency_s

    async def _asked(
        self, request: dict[str, Any], also: Callable[[bytes, Generated], Likelihood] | None = None
    ) -> tuple[Answer, Generated]:
        """An answer of the pinned weights, from whichever engine.

        Raises:
            _Refused: the sample's own error.
            Spoiled: it can't be had.
        """
        why = ""
        for _ in range(RERUNS):
            try:
                answer = await self._router.post(self._target, "/generate", request, timeout_s=self._patience_s)
            except NoTarget:
                raise
            except UpstreamFailed as exc:
                if not exc.faults or any(fault.kind is not FaultKind.TIMEOUT for fault in exc.faults):
                    raise Spoiled(str(exc)) from exc
                raise _Refused(str(exc), exc.faults[-1].upstream, 0.0) from exc
            except RouterError as exc:
                raise Spoiled(str(exc)) from exc
            try:
                generated = parse_answer(answer.status, answer.body)
                if also is not None:
                    generated = replace(generated, logprob=also(answer.body, generated).logprob)
            except SampleFault as exc:
                raise _Refused(str(exc), answer.upstream, answer.latency_s) from exc
            except UnusableAnswer as exc:
                why = str(exc)
            else:
                self._note(answer.upstream, generated.output_tokens)
                if generated.weight_version == self._weight_version:
                    return answer, generated
                why = f"it reports weight_version {generated.weight_version!r}"
            self._useless(answer.upstream, why)
            why = f"{answer.upstream}: {why}"
        raise Spoiled(f"no answer in {RERUNS} runs: {why}")


class _Refused(Exception):
    """A sample's own error, as an engine told it."""

    def __init__(self, why: str, engine: str, latency_s: float) -> None:
        super().__init__(why)
        self.engine = engine
        self.latency_s = latency_s
