"""The controller over fake engines that are processes: signals, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from eval_service.contract.states import PointState
from tests.support.controller_stand import HUNG_SOON, Stand
from tests.support.processes import alive


@pytest.mark.parametrize("victim", ["server_pid", "supervisor_pid"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_signal_to_any_process_of_an_engine_in_mid_lane_costs_no_sample(
    tmp_path: Path, victim: str, number: signal.Signals
) -> None:
    async def body() -> None:
        knobs = {"latency_s": 1.0}  # of the first samples: the lane goes on until both engines are in it
        stand = Stand(tmp_path, prompts=80, processes=True, knobs=knobs, sample_timeout_s=20.0, times=HUNG_SOON)
        async with asyncio.timeout(100), stand.running(2):
            await stand.until_ready()
            stand.put_run("r")
            point = stand.dispatch("r", 1)
            await stand.until_state(point, PointState.RUNNING)
            await stand.until(lambda: stand.lane(point)._in_flight("e0") > 0)
            await asyncio.gather(*(stand.turn(name, latency_s=0.02) for name in stand.runners))
            pid = getattr(stand.engine("e0").report, victim)
            process = psutil.Process(pid)
            os.kill(pid, number)
            [view] = await stand.until_done(point)
            assert view.attempts == 1
            await _mended(stand, process, stopped=number is signal.SIGSTOP and victim == "supervisor_pid")

    asyncio.run(body())


async def _mended(stand: Stand, process: psutil.Process, *, stopped: bool) -> None:
    if stopped:
        process.resume()  # a supervisor that stands still harms nobody until its replica ends
        return
    await stand.until(lambda: not alive([process]))
    await stand.until_ready("e0")
