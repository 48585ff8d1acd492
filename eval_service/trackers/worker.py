"""The process in which a tracker's library runs: `python -m eval_service.trackers.worker FD`.

The socket's first line is the order (JSON: kind, config, state_dir); each further one is a list of items of one run,
and is answered with one line: done, refused (their ids) and error. It ends with its socket, and with whoever started
it; one that hangs is killed by its parent, who tells it the same again.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from eval_service.trackers.told import Item, Refusal

_PR_SET_PDEATHSIG = 1
SINKS = {
    "jsonl": "eval_service.trackers.sinks.to_jsonl",
    "tensorboard": "eval_service.trackers.sinks.to_tensorboard",
    "mlflow": "eval_service.trackers.sinks.to_mlflow",
    "wandb": "eval_service.trackers.sinks.to_wandb",
    "webhook": "eval_service.trackers.sinks.to_webhook",
    "traces": "eval_service.trackers.sinks.to_traces",
}


class Sink(Protocol):
    """One kind of receiver; a module of `sinks` has one as `Sink`, made with (config, state_dir)."""

    def write(self, item: Item) -> None:
        """Write an item; what was written before may come again. Raises whatever the library does, or Refusal."""
        ...

    def flush(self) -> None:
        """Bring what was written to where it outlives this process, or raise."""
        ...


def main(argv: Sequence[str]) -> None:
    """Serve until the parent closes the socket."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with socket.socket(fileno=int(argv[0])) as channel:
        lines = channel.makefile("r", encoding="utf-8")
        order = json.loads(lines.readline())
        sink: Sink | None = None
        for line in lines:
            try:
                sink = sink or open_sink(order)
                answer = deliver(sink, json.loads(line))
            except Exception as exc:  # noqa: BLE001 - whatever a library raises is the answer
                answer = {"done": [], "refused": [], "error": f"{type(exc).__name__}: {exc}"}
            channel.sendall(json.dumps(answer).encode() + b"\n")


def open_sink(order: Mapping[str, Any]) -> Sink:
    """Import a kind's library and open it."""
    made: Sink = importlib.import_module(SINKS[order["kind"]]).Sink(order["config"], order["state_dir"])
    return made


def deliver(sink: Sink, items: Sequence[Item]) -> dict[str, Any]:
    """Write items one after another; what one raises ends it there, and what came before is kept."""
    done: list[str] = []
    refused: list[str] = []
    error = ""
    for item in items:
        try:
            sink.write(item)
        except Refusal as exc:
            refused.append(item["id"])
            print(f"refused: {item['id']}: {exc}", file=sys.stderr, flush=True)
        except Exception as exc:  # noqa: BLE001 - whatever a library raises is the answer
            error = f"{type(exc).__name__}: {exc}"
            break
        else:
            done.append(item["id"])
    sink.flush()
    return {"done": done, "refused": refused, "error": error}


if __name__ == "__main__":
    main(sys.argv[1:])
