"""What the GPU scripts make of logs and views: step times, busy share, speeds, and which targets were reached."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.gpu.figures import (
    SETTLING_STEPS,
    looks_figures,
    loss_figures,
    point_figures,
    speed_figures,
    step_figures,
    verdicts,
)


def log(steps: int, *, staged: dict[int, float], step_s: float = 0.1) -> list[dict[str, Any]]:
    """Steps of the same length; `staged`: what the export after a step made the next one wait."""
    now, entries = 100.0, []
    for step in range(1, steps + 1):
        entries.append({"event": "step_begin", "step": step, "time": now})
        now += step_s
        entries.append({"event": "step_end", "step": step, "time": now, "loss": 1.0 / step})
        if step in staged:
            now += staged[step]
            entries.append({"event": "eval_staged", "step": step, "time": now})
    entries += [{"event": "drain_begin", "time": now}, {"event": "drain_end", "time": now + 3.0}]
    return entries


def test_what_an_export_makes_the_next_step_wait_counts_into_its_own_step() -> None:
    found = step_figures(log(SETTLING_STEPS + 101, staged={20: 0.5, 60: 0.2, SETTLING_STEPS + 101: 9.0}))
    assert found["steps"] == 100
    assert found["exports"] == 2, "the last step's export delays no step"
    assert found["slowest_exporting_step_s"] == pytest.approx(0.6)
    assert found["step_s_mean"] == pytest.approx(0.1 + 0.7 / 100)
    assert found["step_s_median"] == pytest.approx(0.1)
    assert found["drain_s"] == pytest.approx(3.0)
    assert found["losses"][:2] == [1.0, 0.5]


def test_the_first_steps_which_allocate_and_compile_do_not_count() -> None:
    entries = log(SETTLING_STEPS + 3, staged={1: 60.0})
    assert step_figures(entries)["step_s_mean"] == pytest.approx(0.1)


def test_a_log_that_was_cut_early_has_no_figures_and_breaks_nothing() -> None:
    assert step_figures([])["step_s_mean"] is None
    assert step_figures(log(2, staged={})[:1])["last_loss"] is None


def test_an_engine_is_busy_while_it_is_pinned_or_has_requests_and_one_that_is_not_ready_does_not_count() -> None:
    def engine(state: str, in_flight: int = 0) -> dict[str, Any]:
        return {"state": state, "in_flight": in_flight}

    looks = [
        {"engines": [engine("ready", 3), engine("pinning")], "open_points": 2},
        {"engines": [engine("ready"), engine("lost", 5), engine("restarting")], "open_points": 1},
    ]
    found = looks_figures(looks)
    assert found["busy_share"] == pytest.approx(2 / 3)
    assert found["ready_engines_mean"] == pytest.approx(1.5)
    assert (found["points_in_flight_max"], found["looks_with_several_points"]) == (2, 1)
    assert looks_figures([])["busy_share"] is None


def test_the_fleets_speed_is_held_against_one_engine_times_their_number() -> None:
    assert speed_figures(100.0, 380.0, 4)["share_of_one_times_n"] == pytest.approx(0.95)
    assert speed_figures(None, 380.0, 4)["share_of_one_times_n"] is None


def test_losses_are_compared_step_by_step_as_parts_of_themselves() -> None:
    found = loss_figures([2.0, 1.0], [2.0, 1.05, 9.0])
    assert (found["steps"], found["max_relative"]) == (2, pytest.approx(0.05))


def point(step: int, state: str = "done", **timings: float) -> dict[str, Any]:
    keys = ("kind", "force", "reason", "detail", "score", "stderr", "pin_proof", "attempts")
    return {"step": step, "state": state, "lag_steps": step, "timings": timings} | dict.fromkeys(keys)


def test_points_are_counted_by_state_and_their_seconds_spread() -> None:
    found = point_figures([point(0, pin_s=1.0), point(5, pin_s=3.0), point(9, "failed")])
    assert found["points_by_state"] == {"done": 2, "failed": 1}
    assert found["timings"]["pin_s"] == {"mean": 2.0, "median": 2.0, "max": 3.0}
    assert found["timings"]["export_s"] is None
    assert found["lag_steps"]["max"] == 9


def part(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "steps": 200,
        "exports": 5,
        "step_ratio": 1.01,
        "points_by_state": {"done": 6},
        "expected_points": 6,
        "check": {"exit_code": 0},
        "receipt": {"drained": True},
        "happened": [{"what": "scaled down"}, {"what": "scaled up"}, {"what": "killed"}],
        "looks": {"points_in_flight_max": 3},
    }
    return fields | changes


@pytest.mark.parametrize(("changes", "missed"), [
    ({}, None),
    ({"step_ratio": 1.03}, "fleet: mean step"),
    ({"exports": 3}, "fleet: enough steps and exports"),
    ({"points_by_state": {"done": 5, "failed": 1}}, "fleet: every point done"),
    ({"points_by_state": {"done": 5}}, "fleet: every point done"),
    ({"check": {"exit_code": 1}}, "fleet: evalfleet check"),
    ({"receipt": None}, "fleet: drained"),
    ({"happened": [{"what": "killed"}]}, "an engine killed"),
    ({"looks": {"points_in_flight_max": 1}}, "several points in flight"),
])  # fmt: skip
def test_a_target_that_is_missed_is_told(changes: dict[str, Any], missed: str | None) -> None:
    plan = {"engines": 2}
    found = {"plan": plan, "fleet": part(**changes), "throughput": {"share_of_one_times_n": 0.93}}
    wrong = [name for name, reached in verdicts(found).items() if not reached]
    assert len(wrong) == (missed is not None)
    assert all(name.startswith(missed or "") for name in wrong)


def test_a_fleet_of_one_engine_is_killed_and_back_and_not_scaled() -> None:
    happened = [{"what": "killed"}, {"what": "the killed engine is back"}]
    found = {"plan": {"engines": 1}, "fleet": part(happened=happened)}
    assert all(verdicts(found).values())
    assert not all(verdicts(found | {"fleet": part(happened=happened[:1])}).values())


def test_what_evaluation_costs_a_step_on_the_same_gpu_is_told_and_not_judged() -> None:
    found = {"plan": {"engines": 2, "shared": True}, "fleet": part(step_ratio=2.0)}
    assert all(verdicts(found).values())
    assert not all(verdicts(found | {"fleet": part(step_ratio=2.0, exports=3)}).values())


def test_an_export_that_is_not_what_its_step_held_is_torn() -> None:
    sound = {"exit_code": 0, "planned": 2, "equal": {15: True, 30: True}, "different_weights": 2}
    told = "no export from the host's buffer torn"
    assert verdicts({"torn": {"host": sound}}) == {told: True}
    faults: list[dict[str, Any]] = [{"equal": {15: True, 30: False}}, {"equal": {15: True}}, {"different_weights": 1}]
    faults += [{"exit_code": 1}, {"planned": 3}]
    for fault in faults:
        assert verdicts({"torn": {"device": sound, "host": sound | fault}})[told] is False


def test_two_ranks_are_held_against_one_and_equal_losses_are_no_failure() -> None:
    tensor = {"untrained_equal": True, "losses_apart": 0.0, "trained_close": True}
    assert all(verdicts({"tp": tensor}).values())
    assert not all(verdicts({"tp": tensor | {"losses_apart": 0.02}}).values())
    assert not all(verdicts({"tp": tensor | {"untrained_equal": False}}).values())


def test_what_was_not_measured_is_not_judged() -> None:
    assert verdicts({"alone": {"step_s_mean": 0.1}}) == {}
