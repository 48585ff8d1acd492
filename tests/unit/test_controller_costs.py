"""How many engines so much work is worth."""

from __future__ import annotations

import pytest

from eval_service.controller.costs import Costs


def test_while_nothing_is_measured_work_is_worth_the_engines_that_it_fills() -> None:
    costs = Costs(32)
    assert [costs.engines_for("s", unsent) for unsent in (0, 1, 32, 33, 320)] == [0, 1, 1, 2, 10]


@pytest.mark.parametrize(
    ("pin_s", "sample_s", "unsent", "engines"),
    [
        (10.0, 1.0, 320, 1),  # one engine needs 10 s for it, as long as a pin takes
        (10.0, 1.0, 640, 2),  # one engine needs 20 s, two need 10
        (1.0, 1.0, 640, 20),
        (0.0, 1.0, 3, 3),  # never more engines than samples
        (60.0, 0.1, 5000, 1),  # a pin of a minute is not worth 16 s of work
    ],
)
def test_a_further_engine_is_worth_its_pin_while_the_others_need_longer_than_that(
    pin_s: float, sample_s: float, unsent: int, engines: int
) -> None:
    costs = Costs(32)
    costs.note_pin(pin_s)
    costs.note_sample("s", sample_s)
    assert costs.engines_for("s", unsent) == engines
    assert costs.engines_for("s", 0) == 0


def test_measurements_move_with_the_fleet_and_are_kept_by_suite() -> None:
    costs = Costs(1)
    for _ in range(100):
        costs.note_pin(2.0)
        costs.note_sample("fast", 0.1)
        costs.note_sample("slow", 10.0)
    assert costs.pin_s == pytest.approx(2.0)
    assert costs.engines_for("fast", 10) == 1
    assert costs.engines_for("slow", 10) == 10
