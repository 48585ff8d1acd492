"""The process in which scorers run: `python -m eval_service.suites.scorer_worker FD TIMEOUT_S [MODULE ...]`.

It reads requests from a socket, says that it has one, and writes one reply a sample, in order. All of it is JSON, so
nothing of a scorer's is ever unpickled. It ends when the socket closes, and an alarm of the kernel's ends it when a
scorer hangs, so it outlives nobody. Importing the MODULEs registers further scorers.
"""

from __future__ import annotations

import importlib
import json
import math
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from eval_service.suites.scorers import SCORERS, Unparsed

# The alarm is the second line: in time, it is the parent that ends a scorer that hangs.
_ALARM_GRACE_S = 5.0


def main(argv: list[str]) -> None:
    """Serve until the parent closes the socket."""
    descriptor, timeout_s, *modules = argv
    connection = Connection(int(descriptor))
    for module in modules:
        importlib.import_module(module)
    try:
        _send(connection, {"ready": True})
        while True:
            request = json.loads(connection.recv_bytes())
            _send(connection, {"taken": True})  # from here on, how this process ends is the sample's doing
            for output, answer in request["samples"]:
                signal.setitimer(signal.ITIMER_REAL, float(timeout_s) + _ALARM_GRACE_S)
                reply = _score(request["scorer"], output, answer)
                signal.setitimer(signal.ITIMER_REAL, 0)
                _send(connection, reply)
    except (EOFError, OSError):
        return  # the parent is gone, or has enough


def _score(name: str, output: str, answer: str) -> dict[str, Any]:
    try:
        value = float(SCORERS[name].function(output, answer))
    except Unparsed:
        return {"value": 0.0, "unparsed": True}
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - whatever a scorer raises is the sample's error
        return {"error": f"{type(exc).__name__}: {exc}"[:500]}
    return {"value": value} if math.isfinite(value) else {"error": f"the scorer returned {value}"}


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
