"""Scorers that misbehave; importing this registers them, in a scorer process too."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

from eval_service.suites.scorers import Unparsed, scorer


@scorer("raises_on_bad", metric="m")
def raises_on_bad(output: str, answer: str) -> float:
    if output == "bad":
        raise ValueError("can't score this")
    return 1.0


@scorer("exits_on_bad", metric="m")
def exits_on_bad(output: str, answer: str) -> float:
    if output == "bad":
        os._exit(7)
    if output == "sys.exit":
        sys.exit(3)
    return 1.0


@scorer("hangs_on_bad", metric="m")
def hangs_on_bad(output: str, answer: str) -> float:
    if output == "bad":
        threading.Event().wait()
    return 1.0


@scorer("deaf_on_bad", metric="m")
def deaf_on_bad(output: str, answer: str) -> float:
    if output == "bad":
        os.closerange(3, 256)
        threading.Event().wait()
    return 1.0


@scorer("unparsed_on_bad", metric="m")
def unparsed_on_bad(output: str, answer: str) -> float:
    if output == "bad":
        raise Unparsed
    return 1.0


@scorer("nan", metric="m")
def nan(output: str, answer: str) -> float:
    return float("nan")


@scorer("pid", metric="m")
def pid(output: str, answer: str) -> float:
    return float(os.getpid())


@scorer("waits", metric="m")
async def waits(output: str, answer: str, *, seconds: float = 1.0) -> dict[str, float]:
    await asyncio.sleep(seconds)
    return {"m": 1.0, "beside": 0.5}


@scorer("async_bad", metric="m")
async def async_bad(output: str, answer: str) -> float:
    await asyncio.sleep(0.05)
    if output == "raise":
        raise ValueError("can't score this")
    if output == "exit":
        os._exit(7)
    if output == "sys.exit":
        sys.exit(3)
    if output == "wait":
        await asyncio.Event().wait()
    if output == "hang":
        threading.Event().wait()
    if output == "unparsed":
        raise Unparsed
    return 1.0
