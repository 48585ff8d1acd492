"""The process of a checkpoint eval function: one object of the user's class, over many checkpoints."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

import xxhash

from eval_service.apart.child import Parent
from eval_service.functions import EvalContext, EvalSkip


def load(function: str, base: str) -> Any:
    """Import the class.

    Raises:
        TypeError: it is none, lacks a method, or trains.
    """
    sys.path.insert(0, base)
    module, _, name = function.partition(":")
    found = getattr(importlib.import_module(module), name)
    if not inspect.isclass(found):
        raise TypeError(f"{name} is no class")
    for method in ("evaluate_checkpoint", "dispose"):
        if not callable(getattr(found, method, None)):
            raise TypeError(f"{name} has no method {method}")
    if trains := [method for method in ("train", "train_step", "training_step", "fit") if hasattr(found, method)]:
        raise TypeError(f"{name} is what trains (it has {trains[0]}); name a class that only evaluates")
    return found


def check(function: str, base: str) -> int:
    """Import it once; prints the digest of its module's text."""
    try:
        path = inspect.getsourcefile(load(function, base))
    except Exception as exc:  # noqa: BLE001 - the process's edge: said in one line
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    print(xxhash.xxh3_128_hexdigest(Path(path).read_bytes()) if path else "")
    return 0


def serve(parent: Parent) -> None:
    """Evaluate what is asked for, until it is time to dispose."""
    made: Any = None
    while True:
        asked = parent.asked()
        if asked["do"] == "dispose":
            if made is not None:
                made.dispose()
            return
        try:
            if made is None:
                made = load(asked["function"], asked["base"])(**asked["options"])
            parent.tell(**evaluated(made, asked))
        except EvalSkip as exc:
            parent.tell(skip=str(exc) or "it gave no reason")
        except Exception as exc:  # noqa: BLE001 - the process's edge: the point ends with it
            traceback.print_exc()
            parent.tell(crashed=f"{type(exc).__name__}: {exc}")


def evaluated(made: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """One checkpoint's result."""
    names = ("run", "step", "suite", "point", "canary")
    context = EvalContext(**{name: asked[name] for name in names}, scratch=Path(asked["scratch"]))
    made.evaluate_checkpoint(Path(asked["snapshot"]), context)
    return {
        "metrics": {name: metric.model_dump() for name, metric in context.metrics.items()},
        "weight_version": context.weight_version,
        "pin_proof": context.pin_proof,
    }


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        sys.exit(check(*sys.argv[2:4]))
    serve(Parent(int(sys.argv[1])))
