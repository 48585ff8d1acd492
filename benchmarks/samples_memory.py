"""How much memory a point's samples take in the controller: `python -m benchmarks.samples_memory [SAMPLES]`.

All of a point's way from the first request to the recorded result, with a router that answers at once and a ledger
that only says yes. Prints one JSON line: the peak over the size with the suites loaded.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, cast

import psutil

from eval_service.contract.states import PinProof
from eval_service.controller.generating import Generation
from eval_service.controller.judging import Judges
from eval_service.controller.recording import Recorder, Weights
from eval_service.ledger.moves import Runnable
from eval_service.suites.scoring import ScorerPool
from eval_service.suites.suite import Suite, load_suites
from router.router import Answer, Router

_VERSION = "0.0"
_OUTPUT = "so the answer is as follows, word by word: " * 12  # about 128 tokens


class _AtOnce:
    """A router that answers at once."""

    async def post(self, target: str, path: str, body: Any, *, timeout_s: float) -> Answer:
        meta = {
            "finish_reason": {"type": "stop"},
            "prompt_tokens": 50,
            "completion_tokens": 128,
            "weight_version": _VERSION,
        }
        await asyncio.sleep(0)
        answer = {"text": _OUTPUT + body["text"][-8:], "meta_info": meta}
        return Answer(200, json.dumps(answer).encode(), "e", 1, 0.1, [], False)


class _Yes:
    """A ledger that only says yes."""

    async def patiently(self, *_: Any) -> bool:
        return True

    def finish(self) -> bool:
        return True


class Peak:
    """The largest size of this process while it is watched, in bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._over.wait(0.02):
            self.bytes = max(self.bytes, process.memory_info().rss)


async def point(suite: Suite, root: Path, scorers: ScorerPool) -> None:
    """One point, from the first request to the result."""
    generation = Generation(
        suite,
        cast(Router, _AtOnce()),
        target="t",
        weight_version=_VERSION,
        vocab_size=1000,
        patience_s=60.0,
        useless=lambda engine, why: None,
        answered=lambda latency: None,
    )
    answers = await generation.run()
    given = dict.fromkeys(Runnable.__dataclass_fields__, 0) | {"id": "p", "run": "r", "suite": "s", "root": str(root)}
    yes: Any = _Yes()
    recorder = Recorder(Runnable(**cast(Any, given)), 1, suite, yes, yes, scorers, cast(Judges, None))
    await recorder.record(answers, Weights(_VERSION, PinProof.CANARY), {})


def main(samples: int) -> None:
    """Measure, and print."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        rows = (json.dumps({"prompt": "x" * 200 + f"{n:8}", "answer": str(n)}) for n in range(samples))
        (root / "d.jsonl").write_text("\n".join(rows))
        (root / "s.toml").write_text('[suites.s]\ndatasets = [{ name = "d", path = "d.jsonl" }]\n')
        suite = load_suites(root / "s.toml")["s"]
        assert isinstance(suite, Suite)
        idle = psutil.Process().memory_info().rss
        scorers = ScorerPool(1, 30.0)
        try:
            with Peak() as peak:
                asyncio.run(point(suite, root, scorers))
        finally:
            scorers.close()
    told = {"samples": samples, "idle_mb": idle / 1e6, "over_idle_mb": (peak.bytes - idle) / 1e6}
    print(json.dumps({name: round(value, 1) for name, value in told.items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
