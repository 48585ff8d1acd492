"""The process in which scorers run: `python -m eval_service.suites.scorer_worker FD TIMEOUT_S [MODULE ...]`.

It reads requests from a socket, says that it has one, and writes one reply a sample: in order, or from an async scorer
as they come. All of it is JSON, so nothing of a scorer's is ever unpickled. It ends when the socket closes, and an
alarm of the kernel's ends it when a scorer hangs, so it outlives nobody. Importing the MODULEs registers further
scorers. A snapshot's chat template, which is somebody's code as well, is rendered here too.

With `--check` it reads user's functions as JSON from its standard input, imports them, and tells what it found.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import signal
import sys
from collections.abc import Callable
from hashlib import blake2s
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from eval_service.suites.scorers import Unparsed, called, load_all, user_function

# The alarm is the second line: in time, it is the parent that ends a scorer that hangs.
_ALARM_GRACE_S = 5.0


def main(argv: list[str]) -> None:
    """Serve until the parent closes the socket."""
    if argv == ["--check"]:
        sys.stdout.write("\n" + json.dumps([_checked(**given) for given in json.load(sys.stdin)]) + "\n")
        return
    descriptor, timeout_s, *modules = argv
    connection = Connection(int(descriptor))
    load_all()
    for module in modules:
        importlib.import_module(module)
    try:
        _send(connection, {"ready": True})
        while True:
            request = json.loads(connection.recv_bytes())
            _answer(connection, request, request["timeout_s"] or float(timeout_s))
    except (EOFError, OSError):
        return  # the parent is gone, or has enough


def _answer(connection: Connection, request: dict[str, Any], timeout_s: float) -> None:
    samples = request["samples"]
    step, function, options = _step(request)
    together = function is not None and inspect.iscoroutinefunction(function)
    # From here on, how this process ends is the samples' doing.
    _send(connection, {"taken": True, "together": together})
    if together and function is not None:
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 2 * _ALARM_GRACE_S)
        asyncio.run(_together(connection, samples, timeout_s, function, options))
        signal.setitimer(signal.ITIMER_REAL, 0)
    else:
        _one_by_one(connection, samples, timeout_s, step)


_Step = Callable[[Any], dict[str, Any]]


def _step(request: dict[str, Any]) -> tuple[_Step, Callable[..., Any] | None, dict[str, Any]]:
    """What is done with each sample; a scorer's own function and options beside it."""
    try:
        if request["what"] == "render":
            from eval_service.suites.chat import Renderer

            renderer = Renderer(**request["options"])
            return lambda sample: _rendered(renderer, sample[0]), None, {}
        function, options = called(request["scorer"], request["options"])
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - as if each of them had raised it
        error = {"error": _told(exc)}
        return lambda sample: error, None, {}
    return lambda sample: _outcome(lambda: function(*sample, **options)), function, options


def _one_by_one(connection: Connection, samples: list[Any], timeout_s: float, step: _Step) -> None:
    for number, sample in enumerate(samples):
        signal.setitimer(signal.ITIMER_REAL, timeout_s + _ALARM_GRACE_S)
        reply = step(sample)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, {"number": number, **reply})


async def _together(
    connection: Connection,
    samples: list[tuple[str, str]],
    timeout_s: float,
    function: Callable[..., Any],
    options: dict[str, Any],
) -> None:
    """All at once, each with its own deadline."""

    async def one(number: int, output: str, answer: str) -> None:
        try:
            async with asyncio.timeout(timeout_s) as bound:
                value = await function(output, answer, **options)
            reply = _outcome(lambda: value)
        except Unparsed:
            reply = {"value": 0.0, "unparsed": True}
        except (Exception, SystemExit, asyncio.CancelledError) as exc:  # noqa: BLE001 - the sample's error
            reply = {"error": f"no score within {timeout_s:g} s" if bound.expired() else _told(exc)}
        _send(connection, {"number": number, **reply})

    await asyncio.gather(*(one(number, *sample) for number, sample in enumerate(samples)))


def _outcome(scored: Callable[[], Any]) -> dict[str, Any]:
    try:
        return _made_of(scored())
    except Unparsed:
        return {"value": 0.0, "unparsed": True}
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - whatever a scorer raises is the sample's error
        return {"error": _told(exc)}


def _made_of(score: Any) -> dict[str, Any]:
    """A reply of one number, or of several by name: the first of them counts, the others are told beside it."""
    if not isinstance(score, dict):
        value = float(score)
        return {"value": value} if math.isfinite(value) else {"error": f"the scorer returned {value}"}
    values = {str(name): float(value) for name, value in score.items()}
    if not values or not all(math.isfinite(value) for value in values.values()):
        return {"error": f"the scorer returned {values}"}
    (_, value), *more = values.items()
    return {"value": value, "more": dict(more)}


def _rendered(renderer: Any, messages: str) -> dict[str, Any]:
    try:
        text, ids = renderer.render(json.loads(messages))
    except Exception as exc:  # noqa: BLE001 - whatever a template raises is the prompt's error
        return {"error": f"the chat template can't render it: {_told(exc)}"}
    return {"text": text, "ids": ids}


def _checked(function: str, directory: str) -> dict[str, str]:
    """A user's function, imported: the digest of its module's text, or what is wrong."""
    try:
        found = user_function(function, directory)
        source = inspect.getsourcefile(inspect.unwrap(found))
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - told with the suite's key
        return {"error": _told(exc)}
    return {"digest": blake2s(Path(source).read_bytes()).hexdigest() if source else ""}


def _told(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"[:500]


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
