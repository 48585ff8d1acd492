"""What evals of others have made: from their scratch directory into the ledger and beside the run, once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from eval_service.contract.results import Alarm, AlarmKind, Metric, SampleView
from eval_service.contract.states import PointState, Reason
from eval_service.controller.db import DaemonThreads, LedgerThread
from eval_service.controller.outcomes import LaneEnd
from eval_service.controller.recording import Weights, files_of
from eval_service.ledger.database import Fenced
from eval_service.ledger.moves import Moves, Result, Runnable
from eval_service.suites.alarms import alarms_of
from eval_service.suites.kinds import FunctionSuite, LmEvalSuite
from eval_service.suites.samples import write_samples
from eval_service.suites.sources import LOOK_S

_MAX_ERROR_RATE = 0.05
_AROUND = ("stderr", "low", "high")


@dataclass(frozen=True, slots=True)
class Made:
    """What was reported. `samples`: the file that they are in, a line each; it may be missing."""

    metrics: Mapping[str, Metric]
    samples: Path
    weights: Weights
    timings: Mapping[str, float]
    asked: str  # the suite's digest as it was when it was evaluated
    alarms: tuple[Alarm, ...] = ()  # beside those of the samples and metrics


@dataclass(frozen=True, slots=True)
class Keeper:
    """Records one attempt."""

    point: Runnable
    number: int
    suite: LmEvalSuite | FunctionSuite
    moves: Moves
    ledger: LedgerThread

    async def record(self, made: Made) -> None:
        """Write the samples, then the result.

        Raises:
            LaneEnd: the headline is missing.
            OSError: the samples can't be written now.
            Fenced: another controller acts.
        """
        config, point = self.suite.config, self.point
        metrics, odd = finite(made.metrics)
        headline = metrics.get(config.metric)
        if config.metric not in made.metrics:
            there = ", ".join(sorted(made.metrics)) or "none"
            raise LaneEnd(PointState.FAILED, Reason.CRASHED, f"no metric {config.metric!r} came; there are: {there}")
        former, path = files_of(point, self.number)
        threads = DaemonThreads("samples")
        samples = await threads.run(lambda: list(_read(made.samples)))
        await threads.run(lambda: write_samples(path, samples, former=former))
        result = Result(
            metrics=metrics,
            score=headline.value if headline else None,
            stderr=headline.stderr if headline else None,
            samples_path=str(path),
            weight_version=made.weights.version,
            pin_proof=made.weights.proof,
            engines=tuple(sorted({sample.engine for sample in samples if sample.engine})),
            timings=dict(made.timings),
            headline=config.metric,
            direction=config.direction,
            suite_digest=made.asked,
            alarms=(alarms_of(samples, headline, max_error_rate=_MAX_ERROR_RATE) if samples else ())
            + odd
            + made.alarms,
        )
        recorded = False
        with suppress(Fenced):
            recorded = await self.ledger.patiently(self.moves.finish, point.id, result)
        if not recorded:
            await threads.run(lambda: path.unlink(missing_ok=True))


def finite(metrics: Mapping[str, Metric]) -> tuple[dict[str, Metric], tuple[Alarm, ...]]:
    """The metrics that are numbers, and an alarm that tells of those that are none; JSON has no word for them."""
    found = {
        name: metric.model_copy(update={part: None for part in _AROUND if not isfinite(getattr(metric, part) or 0.0)})
        for name, metric in metrics.items()
        if isfinite(metric.value)
    }
    odd = {name: str(metric.value) for name, metric in metrics.items() if name not in found}
    if not odd:
        return found, ()
    message = f"no finite number: {', '.join(f'{name} is {value}' for name, value in odd.items())}"
    return found, (Alarm(kind=AlarmKind.NOT_FINITE, message=message[:1000], evidence=dict(odd)),)


async def digest_now(suite: LmEvalSuite | FunctionSuite) -> str:
    """What the suite's files come to now; what they did at the start where their storage does not answer in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOK_S):
            return await DaemonThreads("suites").run(suite.digest_now)
    return suite.digest


def metrics_of(told: Mapping[str, Any]) -> dict[str, Metric]:
    """As a process told them."""
    return {name: Metric.model_validate(metric) for name, metric in told.items()}


def _read(path: Path) -> Iterator[SampleView]:
    if path.exists():
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                yield SampleView.model_validate(json.loads(line))
