"""A signal that comes while the main thread waits for one: at whatever line, it is heard, and nothing hangs.

Python runs a handler between any two lines of the thread that it interrupts. One that takes a lock which this thread
holds at that moment waits for itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each case gives `wait`, which waits for a moment, and `heard`.
LAUNCH = """
from eval_service.launch.run import Signals
signals = Signals()
cases.enter_context(signals.installed())
wait = lambda: signals.pause(0.001)
heard = lambda: signals.count == 1
"""
SERVE = """
import threading
from eval_service.serve.launch import _stop_on_signals
stop = threading.Event()
_stop_on_signals(stop)
wait = lambda: stop.wait(0.001)
heard = lambda: stop.wait(30.0)
"""
WATCH = """
from eval_service.cli.watching import _stop_asked
stop = cases.enter_context(_stop_asked())
wait = lambda: stop.wait(0.001)
heard = lambda: stop.wait(0.0)
"""
EACH_LINE = """
import signal, sys
from contextlib import ExitStack

def told_at(line, case):
    seen = [0]
    def trace(frame, event, _):
        if event == "line":
            seen[0] += 1
            if seen[0] == line:
                signal.raise_signal(signal.SIGTERM)
        return trace
    with ExitStack() as cases:
        given = {"cases": cases}
        exec(case, given)
        sys.settrace(trace)
        given["wait"]()
        sys.settrace(None)
        if seen[0] >= line:
            assert given["heard"](), line
    return seen[0] >= line

line = 1
while told_at(line, sys.argv[1]):
    line += 1
print(line)
"""


@pytest.mark.parametrize("case", [LAUNCH, SERVE, WATCH], ids=["launch", "serve", "watch"])
def test_a_signal_at_any_line_of_a_wait_is_heard_and_hangs_nothing(case: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", EACH_LINE, case], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 3, "it was at several lines of the wait"
