"""The scheduler's promises, over all the fleets and queues that hypothesis can think of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from eval_service.controller.scheduler import Claim, Lease, Shares, plan
from eval_service.ledger.moves import Runnable
from tests.support.properties import steady

PATIENCE_S = 100.0


def point(number: int, *, run: str = "r", step: int | None = None, **values: object) -> Runnable:
    given: dict[str, object] = {
        "id": f"p{number}",
        "seq": number,
        "run": run,
        "step": number if step is None else step,
        "suite": "s",
        "force": False,
        "priority": 0,
        "attempts": 0,
        "queued_at": 0.0,
        "max_engines": None,
        "root": "/",
        "snapshot": "/x",
        "snapshot_id": "x",
        "digest": "d" * 32,
        "tensor_digest": "t" * 32,
        "vocab_size": 8,
        **values,
    }
    return Runnable(**given)  # type: ignore[arg-type]


def leases(
    claims: list[Claim], engines: int, held: dict[str, int] | None = None, served: dict[str, int] | None = None
) -> list[Lease]:
    return plan(claims, [f"e{n}" for n in range(engines)], Shares(held or {}, served or {}), patience_s=PATIENCE_S)


def taken(claims: list[Claim], engines: int, **shares: dict[str, int]) -> list[str]:
    return [lease.point for lease in leases(claims, engines, **shares)]


runs = st.sampled_from(["a", "b", "c"])
claims_of = st.lists(
    st.builds(
        lambda run, step, force, priority, quota, wants, engines, refused, waited: (
            run,
            step,
            force,
            priority,
            quota,
            wants,
            engines,
            refused,
            waited,
        ),
        runs,
        st.integers(0, 20),
        st.booleans(),
        st.integers(-1, 2),
        st.one_of(st.none(), st.integers(1, 3)),
        st.integers(0, 5),
        st.integers(0, 3),
        st.frozensets(st.sampled_from(["e0", "e1", "e2"]), max_size=2),
        st.floats(0, 3 * PATIENCE_S),
    ),
    max_size=12,
)


def built(rows: list[tuple[object, ...]]) -> tuple[list[Claim], dict[str, int]]:
    quotas: dict[object, object] = {}
    claims = []
    held: Counter[str] = Counter()
    for number, (run, step, force, priority, quota, wants, engines, refused, waited) in enumerate(rows):
        quotas.setdefault(run, quota)  # a quota is a run's
        made = point(number, run=run, step=step, force=force, priority=priority, max_engines=quotas[run])  # type: ignore[arg-type]
        claims.append(Claim(made, wants, engines, refused, waited))  # type: ignore[arg-type]
        held[made.run] += int(str(engines))
    return claims, dict(held)


@steady
@given(claims_of, st.integers(0, 6))
def test_no_engine_goes_to_two_points_and_nobody_gets_more_than_wanted_or_allowed(
    rows: list[tuple[object, ...]], engines: int
) -> None:
    claims, held = built(rows)
    given_out = leases(claims, engines, held)
    assert len({lease.engine for lease in given_out}) == len(given_out)
    by_id = {claim.point.id: claim for claim in claims}
    counts = Counter(lease.point for lease in given_out)
    total = Counter(held)
    for id_, count in counts.items():
        assert count <= by_id[id_].wants
        total[by_id[id_].point.run] += count
    for claim in claims:
        quota = claim.point.max_engines
        if quota is not None and counts[claim.point.id]:
            assert total[claim.point.run] <= quota
    assert all(lease.engine not in by_id[lease.point].refused for lease in given_out)


@steady
@given(claims_of, st.integers(0, 6))
def test_no_engine_stays_idle_while_a_point_that_may_have_it_wants_one(
    rows: list[tuple[object, ...]], engines: int
) -> None:
    claims, held = built(rows)
    given_out = leases(claims, engines, held)
    idle = {f"e{n}" for n in range(engines)} - {lease.engine for lease in given_out}
    counts = Counter(lease.point for lease in given_out)
    total = Counter(held)
    for claim in claims:
        total[claim.point.run] += counts[claim.point.id]
    for claim in claims:
        quota = claim.point.max_engines
        left = quota is None or total[claim.point.run] < quota
        if idle - claim.refused and left:
            assert counts[claim.point.id] == claim.wants


@steady
@given(claims_of, st.integers(0, 6))
def test_the_same_question_has_the_same_answer_whatever_the_order_it_is_asked_in(
    rows: list[tuple[object, ...]], engines: int
) -> None:
    claims, held = built(rows)
    assert leases(claims, engines, held) == leases(claims[::-1], engines, held)


@steady
@given(claims_of)
def test_a_higher_priority_goes_first_unless_somebody_waited_too_long(rows: list[tuple[object, ...]]) -> None:
    claims, held = built(rows)
    fresh = [replace(claim, waited_s=0.0, refused=frozenset()) for claim in claims]
    free = {claim.point.id: claim for claim in fresh if claim.wants and claim.point.max_engines is None}
    chosen = taken(fresh, 1, held=held)
    if chosen and free:
        best = max(claim.point.priority for claim in free.values())
        assert next(c for c in fresh if c.point.id == chosen[0]).point.priority >= best


def test_runs_of_one_priority_share_the_engines_and_steps_of_a_run_come_in_order() -> None:
    claims = [Claim(point(n, run=run, step=step), 9) for n, (run, step) in enumerate([("a", 1), ("a", 2), ("b", 50)])]
    assert Counter(taken(claims, 4)) == {"p0": 2, "p2": 2}
    assert taken(claims, 1, held={"a": 1, "b": 0}) == ["p2"]
    assert taken([Claim(point(5), 1), Claim(point(3), 1), Claim(point(4), 1)], 2) == ["p3", "p4"]


def test_of_runs_that_hold_as_many_the_one_that_was_served_longest_ago_goes_first() -> None:
    claims = [Claim(point(1, run="a", step=1), 1), Claim(point(2, run="b", step=900), 1)]
    assert taken(claims, 1, served={"a": 7, "b": 3}) == ["p2"]
    assert taken(claims, 1, served={"a": 3, "b": 7}) == ["p1"]
    assert taken(claims, 1, served={"a": 3}) == ["p2"]


def test_a_point_that_has_waited_too_long_goes_before_any_priority_and_a_forced_one_sooner() -> None:
    high = Claim(point(1, run="a", priority=9), 1)
    low = Claim(point(2, run="b"), 1)
    forced = Claim(point(3, run="c", force=True), 1)
    assert taken([high, low, forced], 1) == ["p1"]
    assert taken([high, replace(low, waited_s=PATIENCE_S)], 1) == ["p2"]
    assert taken([high, replace(low, waited_s=PATIENCE_S / 2), replace(forced, waited_s=PATIENCE_S / 2)], 1) == ["p3"]
    assert taken([high, replace(low, waited_s=9 * PATIENCE_S, engines=1)], 1) == ["p1"], "it has an engine already"


@dataclass
class World:
    """Points come for ever, one engine serves one point a turn; a model of months in milliseconds."""

    served: dict[str, int] = field(default_factory=dict)
    queue: list[Claim] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    def turn(self, arrivals: list[Runnable], engines: int) -> None:
        self.queue = [replace(claim, waited_s=claim.waited_s + 10.0) for claim in self.queue]
        self.queue += [Claim(arrival, 1) for arrival in arrivals]
        for lease in leases(self.queue, engines, served=self.served):
            claim = next(claim for claim in self.queue if claim.point.id == lease.point)
            self.queue.remove(claim)
            self.served[claim.point.run] = max(self.served.values(), default=0) + 1
            self.finished.append(claim.point.id)


@steady
@given(st.booleans(), st.integers(-5, 0), st.integers(1, 2), st.integers(0, 10**6))
def test_no_point_starves_however_many_others_of_whatever_priority_keep_coming(
    force: bool, priority: int, engines: int, step: int
) -> None:
    world = World()
    victim = point(0, run="victim", step=step, force=force, priority=priority)
    world.turn([victim], 0)
    for turn in range(1, 40):
        world.turn([point(10 * turn + n, run="busy", step=turn, priority=1) for n in range(engines + 1)], engines)
    assert "p0" in world.finished


@steady
@given(st.integers(2, 5), st.integers(0, 10**6))
def test_a_run_of_high_steps_gets_its_share_beside_one_of_low_steps(runs_: int, step: int) -> None:
    world = World()
    for turn in range(60):
        world.turn(
            [point(100 * turn + n, run=f"r{n}", step=turn + (step if n == 0 else 0)) for n in range(runs_)], engines=1
        )
    counts = Counter(int(id_[1:]) % 100 for id_ in world.finished[: 10 * runs_])
    assert max(counts.values()) - min(counts.values()) <= 1
