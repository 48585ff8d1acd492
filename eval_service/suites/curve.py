"""The points of a curve, each beside another one on the prompts of both: made once, kept, and bounded in what it costs.

A point's samples are a file that never changes once it is there, so what was found of two files is found for good. One
call reads files for `budget_s` at most (and one pair at least, so that asking again gets there); what was found before
costs no file. Only one caller reads at a time: others get what there is.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

from eval_service.contract.curves import Beside, sentence
from eval_service.contract.errors import Conflict, NotFound
from eval_service.contract.results import Direction
from eval_service.suites.comparison import Scores, Side, check_same_suite, difference, scores_in
from eval_service.suites.samples import open_samples

BUDGET_S = 0.25  # a page waits for it; some sixty pairs of files of 2,000 samples
KEPT = 20_000  # pairs: those of twenty runs of a thousand points

Pair = tuple[Side, Side]  # the other one, and the point that is judged
_Key = tuple[str, str, str, str, Direction]  # a point that is tried again has another file


@dataclass(slots=True)
class Besides:
    """Keeps what was found. Any thread may call it."""

    budget_s: float = BUDGET_S
    kept: int = KEPT
    clock: Callable[[], float] = time.monotonic
    _found: OrderedDict[_Key, Beside] = field(default_factory=OrderedDict)
    _reading: Lock = field(default_factory=Lock)
    _table: Lock = field(default_factory=Lock)

    def known(self, pairs: Sequence[Pair], direction: Direction) -> list[Beside | None]:
        """What was found before, pair by pair; touches no file."""
        return [self._look(_key(pair, direction)) for pair in pairs]

    def told(self, pairs: Sequence[Pair], direction: Direction) -> list[Beside | None]:
        """The same, and what `budget_s` is enough for of the rest, the last pairs first."""
        unread: dict[_Key, Beside] = {}
        if self._reading.acquire(blocking=False):
            try:
                unread = self._find(pairs, direction)
            finally:
                self._reading.release()
        keys = [_key(pair, direction) for pair in pairs]
        return [self._look(key) or unread.get(key) for key in keys]

    def _find(self, pairs: Sequence[Pair], direction: Direction) -> dict[_Key, Beside]:
        """Returns those whose files can't be read now, which is nothing to keep."""
        until = self.clock() + self.budget_s
        read, unread = _Read(), {}
        for pair in reversed(pairs):
            key = _key(pair, direction)
            if self._look(key) is not None:
                continue
            try:
                self._keep(key, _beside(pair, direction, read))
            except (NotFound, OSError) as exc:
                unread[key] = _not(pair[0], exc.message if isinstance(exc, NotFound) else f"can't be read: {exc}")
            if self.clock() >= until:
                break
        return unread

    def _look(self, key: _Key) -> Beside | None:
        with self._table:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
            return found

    def _keep(self, key: _Key, found: Beside) -> None:
        with self._table:
            self._found[key] = found
            while len(self._found) > self.kept:
                self._found.popitem(last=False)


@dataclass(slots=True)
class _Read:
    """The scores of the last two files: neighbours share one, and so do all that are held against the same point."""

    last: OrderedDict[Path, Scores] = field(default_factory=OrderedDict)

    def __call__(self, path: Path) -> Scores:
        if path not in self.last:
            with open_samples(path) as file:
                self.last[path] = scores_in(file)
        self.last.move_to_end(path)
        if len(self.last) > 2:
            self.last.popitem(last=False)
        return self.last[path]


def _key(pair: Pair, direction: Direction) -> _Key:
    a, b = pair
    return (a.point, b.point, str(a.path), str(b.path), direction)


def _beside(pair: Pair, direction: Direction, read: _Read) -> Beside:
    """Compare the two.

    Raises:
        NotFound, OSError: a file is gone, or can't be read now.
    """
    a, b = pair
    try:
        if not (a.suite_digest and b.suite_digest):
            return _not(a, f"an older version recorded one of step {a.step} and step {b.step}: see `evalfleet compare`")
        check_same_suite(a, b)
        of_b = read(b.path)  # first: it is what the last pair was held against, or what this one's other one outlives
        told = difference(pair, (read(a.path), of_b), direction)
    except Conflict:
        return _not(a, f"step {b.step} was asked other things than step {a.step}, or with other data")
    found = Beside(
        point=a.point,
        step=a.step,
        **asdict(told.found),
        verdict=told.verdict,
        prompts=told.prompts,
        improved=told.improved,
        worsened=told.worsened,
        said="",
    )
    return found.model_copy(update={"said": sentence(told.a, told.b, found)})


def _not(a: Side, why: str) -> Beside:
    return Beside(point=a.point, step=a.step, difference=None, said=why)
