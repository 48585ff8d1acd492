"""What is told of a process's memory and files, from looks that the test makes up."""

from __future__ import annotations

from collections.abc import Callable

from eval_service.chaos.meter import Look, growth

MB = 1 << 20


def looks(size_mb: Callable[[float], float], files: Callable[[float], int] = lambda _: 40) -> list[Look]:
    """A look every 5 s for 30 minutes; the functions are of the minute."""
    return [Look(at_s, int(size_mb(at_s / 60) * MB), files(at_s / 60)) for at_s in range(0, 1800, 5)]


def test_a_leak_is_told_in_megabytes_a_minute_and_what_is_taken_at_first_is_none() -> None:
    leaks = growth(looks(lambda minute: 100 + 2 * minute), warm_at_s=600, warm_up_s=180, least_s=180)
    assert leaks is not None
    assert abs(leaks.mb_per_min - 2.0) < 0.01
    assert leaks.each_min_mb[:2] == (120.9, 122.9)
    assert len(leaks.each_min_mb) == 20
    warms = growth(looks(lambda minute: 100 + 30 * min(minute, 9)), warm_at_s=600, warm_up_s=180, least_s=180)
    assert warms is not None
    assert warms.mb_per_min == 0.0


def test_files_that_stay_open_are_told() -> None:
    found = growth(looks(lambda _: 100, lambda minute: 40 + int(minute)), warm_at_s=600, warm_up_s=0, least_s=180)
    assert found is not None
    assert found.files_last - found.files_first > 10


def test_a_short_life_or_a_cold_one_says_nothing() -> None:
    whole = looks(lambda _: 100)
    assert growth(whole[:20], warm_at_s=0, warm_up_s=60, least_s=180) is None
    assert growth(whole, warm_at_s=1750, warm_up_s=0, least_s=10) is not None
    assert growth(whole[-30:], warm_at_s=600, warm_up_s=180, least_s=1) is None
    assert growth([], warm_at_s=0, warm_up_s=0, least_s=0) is None
