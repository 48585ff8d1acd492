"""What a person sees while a run goes on: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from eval_service.contract.wire import Receipt

LINE_INTERVAL_S = 5.0


class Display:
    """Shows steps; `stream` decides between bar and lines."""

    def __init__(self, first: int, last: int, stream: TextIO = sys.stderr) -> None:
        self._last = last
        self._stream = stream
        self._bar: Any = None
        self._line_at = 0.0
        if stream.isatty() and last > first:
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=last, initial=first, unit="step", desc="train", file=stream)

    def step(self, step: int, loss: float, rate: float) -> None:
        """A step was completed."""
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", lr=f"{rate:.2e}", refresh=False)
            self._bar.update(1)
        elif step == self._last or time.monotonic() - self._line_at >= LINE_INTERVAL_S:
            self._line_at = time.monotonic()
            self.say(f"step {step}/{self._last} loss {loss:.4f} lr {rate:.2e}")

    def draining(self, receipt: Receipt) -> None:
        """A long poll of the drain came back."""
        self.say(f"drain: {len(receipt.done)} done, waiting for {len(receipt.pending)}")

    def say(self, line: str) -> None:
        """A line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()
