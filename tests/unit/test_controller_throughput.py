"""Tokens per second of engines, with a clock of the test's own."""

from __future__ import annotations

from eval_service.controller.throughput import WINDOW_S, Throughput


def test_an_engines_rate_is_of_the_last_seconds_alone_and_no_other_engines() -> None:
    now = [100.0]
    throughput = Throughput(lambda: now[0])
    for _ in range(20):  # 10 s of 2 answers a second, 8 tokens each
        now[0] += 0.5
        throughput.note("e0", 8)
    assert throughput.per_s("e0") == 20 * 8 / WINDOW_S
    assert throughput.per_s("e1") == 0.0
    now[0] += WINDOW_S / 2
    assert throughput.per_s("e0") < 20 * 8 / WINDOW_S
    now[0] += WINDOW_S
    assert throughput.per_s("e0") == 0.0


def test_many_answers_at_once_are_all_counted_and_kept_in_little_room() -> None:
    throughput = Throughput(lambda: 1.0)
    for _ in range(10_000):
        throughput.note("e0", 1)
    assert throughput.per_s("e0") == 10_000 / WINDOW_S
    assert len(throughput._bins["e0"]) == 1
