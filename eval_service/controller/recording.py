"""Scoring a point's samples and recording its result: the samples' file first, then one write to the ledger.

Each attempt has a file of its own, so that one that was overtaken can't replace the result's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from eval_service.contract.names import samples_file
from eval_service.contract.results import Alarm
from eval_service.contract.states import PinProof, PointState, Reason
from eval_service.contract.wire import SampleView
from eval_service.controller.db import DaemonThreads, LedgerThread
from eval_service.controller.generating import Answered
from eval_service.controller.judging import Judges
from eval_service.controller.outcomes import LaneEnd
from eval_service.ledger.database import Fenced
from eval_service.ledger.moves import Moves, Result, Runnable
from eval_service.suites.alarms import alarms_of, suite_stale
from eval_service.suites.choosing import choice_note, choice_score
from eval_service.suites.datasets import Prompt
from eval_service.suites.generation import Generated
from eval_service.suites.samples import write_samples
from eval_service.suites.scorer_config import Code, Judge
from eval_service.suites.scoring import Score, ScorerPool
from eval_service.suites.sources import LOOK_S, Source, changed
from eval_service.suites.statistics import Aggregated, aggregate
from eval_service.suites.suite import Suite

_FIELDS = set(SampleView.model_fields)


@dataclass(frozen=True, slots=True)
class Weights:
    """What the samples were made with, and how that is known."""

    version: str
    proof: PinProof


@dataclass(frozen=True, slots=True)
class _Found:
    """A score, and what it rests on."""

    score: Score
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records one attempt at a point."""

    point: Runnable
    number: int
    suite: Suite
    moves: Moves
    ledger: LedgerThread
    scorers: ScorerPool
    judges: Judges
    threads: DaemonThreads = field(default_factory=lambda: DaemonThreads("samples"))

    async def record(self, answers: Sequence[Answered], weights: Weights, timings: Mapping[str, float]) -> None:
        """Score, write the samples, write the result.

        Raises:
            LaneEnd: too many samples errored.
            ScorerPoolFailed, OSError: they can't be scored or written now.
            Fenced: another controller acts.
        """
        began = time.monotonic()
        samples = await self._scored(answers, weights.version)
        found, alarms = await asyncio.to_thread(self._made_of, samples)
        if found.error_rate > self.suite.max_error_rate:
            errors = [sample.error for sample in samples if sample.error]
            detail = f"{found.error_rate:.1%} of the samples errored, such as: {errors[0]}"
            raise LaneEnd(PointState.FAILED, Reason.ERROR_RATE, detail)
        point = self.point
        former, path = files_of(point, self.number)
        await self.threads.run(lambda: write_samples(path, samples, former=former))
        spent = {**timings, "score_s": time.monotonic() - began}
        try:
            alarms += suite_stale(await self._changed())
            result = replace(self._result(found, weights, samples, path, spent), alarms=alarms)
            recorded = await self.ledger.patiently(self.moves.finish, point.id, result)
        except Fenced:
            await self.threads.run(lambda: path.unlink(missing_ok=True))
            raise
        if not recorded:
            await self.threads.run(lambda: path.unlink(missing_ok=True))

    async def _changed(self) -> list[tuple[Source, str | None]]:
        """The suite's files that hold something else by now; none where their storage does not answer in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                return await self.threads.run(lambda: changed(self.suite.sources))
        return []

    async def _scored(self, answers: Sequence[Answered], version: str) -> list[SampleView]:
        given = [(answer.ask.prompt, answer.generated) for answer in answers if answer.generated is not None]
        found = iter(await self._found(given))
        return [_sample_view(answer, next(found) if answer.generated else None, version) for answer in answers]

    async def _found(self, given: Sequence[tuple[Prompt, Generated]]) -> list[_Found]:
        """A score for each answer, in their order."""
        config = self.suite.config.scorer
        outputs, answers = [made.output for _, made in given], [prompt.answer for prompt, _ in given]
        if self.suite.config.chooses:
            told = [(prompt, made.likelihoods) for prompt, made in given]
            return [_Found(choice_score(*choices), choice_note(*choices)) for choices in told]
        if isinstance(config, Judge):
            return await self._judged(config, given)
        if isinstance(config, Code) and config.prepend_prompt:
            outputs = [prompt.text + made.output for prompt, made in given]
        return [_Found(score) for score in await self.scorers.score(self.suite.call, outputs, answers)]

    async def _judged(self, config: Judge, given: Sequence[tuple[Prompt, Generated]]) -> list[_Found]:
        asked = [config.asked(prompt=p.text, output=made.output, answer=p.answer) for p, made in given]
        verdicts = await self.judges.verdicts(config, asked)
        said = [verdict.text for verdict in verdicts]
        scores = await self.scorers.score(self.suite.call, said, [prompt.answer for prompt, _ in given])
        return [
            _Found(score if verdict.error is None else Score(None, verdict.error), verdict.text or None)
            for verdict, score in zip(verdicts, scores, strict=True)
        ]

    def _made_of(self, samples: Sequence[SampleView]) -> tuple[Aggregated, tuple[Alarm, ...]]:
        """The slow half of a result, for a thread."""
        found = aggregate(self.suite, samples)
        headline = found.metrics.get(found.headline)
        return found, alarms_of(samples, headline, max_error_rate=self.suite.max_error_rate)

    def _result(
        self,
        found: Aggregated,
        weights: Weights,
        samples: Sequence[SampleView],
        path: Path,
        timings: dict[str, float],
    ) -> Result:
        return Result(
            metrics=found.metrics,
            score=found.score,
            stderr=found.stderr,
            samples_path=str(path),
            weight_version=weights.version,
            pin_proof=weights.proof,
            engines=tuple(sorted({sample.engine for sample in samples if sample.engine})),
            timings=timings,
            headline=found.headline,
            direction=self.suite.config.direction,
            suite_digest=self.suite.digest,
        )


def files_of(point: Runnable, number: int) -> tuple[list[Path], Path]:
    """Where an attempt's samples lie, after those of the attempts before it.

    Of these one is there where its controller was killed before the ledger knew of the file.
    """
    names = [f"{point.id}-{attempt}" for attempt in range(1, number + 1)]
    *former, path = [samples_file(point.root, point.run, point.step, point.suite, name) for name in names]
    return former, path


def _sample_view(answer: Answered, found: _Found | None, weight_version: str) -> SampleView:
    generated, prompt = answer.generated, answer.ask.prompt
    score = found.score if found else None
    # The values are ours, and a set of fields of its own would double what each of a hundred thousand takes.
    return SampleView.model_construct(
        _fields_set=_FIELDS,
        index=answer.ask.index,
        prompt_index=prompt.index,
        sample_index=answer.ask.sample,
        seed=answer.ask.seed,
        dataset=prompt.dataset,
        prompt=prompt.text,
        answer=prompt.answer,
        output=generated.output if generated else "",
        score=score.value if score else None,
        error=answer.error or (score.error if score else None),
        unparsed=score.unparsed if score else False,
        finish_reason=generated.finish_reason if generated else None,
        prompt_tokens=generated.prompt_tokens if generated else 0,
        output_tokens=generated.output_tokens if generated else 0,
        engine=answer.engine,
        weight_version=generated.weight_version if generated else weight_version,
        latency_s=answer.latency_s,
        logprob=generated.logprob if generated else None,
        more=dict(score.more) if score else {},
        note=found.note if found else None,
    )
