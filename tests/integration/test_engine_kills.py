"""No death leaves an orphan: kill -9 of a server, a supervisor, a replica, and of SGLang's own children."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from eval_service.contract.wire import EngineState
from eval_service.engine.protocol import EngineReport, PinError
from eval_service.engine.runner import EngineRunner
from eval_service.engine.server import BootOptions
from eval_service.fleet_config import GroupConfig
from tests.support.engine_link import TestLink
from tests.support.engine_model import TinyModel, make_model, truncated
from tests.support.processes import assert_gone, tree

GRADES = ["fake", pytest.param("sglang-cpu", marks=pytest.mark.real)]


@pytest.fixture
def model(tmp_path: Path) -> TinyModel:
    return make_model(tmp_path / "boot", seed=0)


@pytest.fixture
def place() -> Iterator[Path]:
    """Scratch space of its own, by a short name: any engine that starts on this host collects what nobody holds."""
    with tempfile.TemporaryDirectory(prefix="e-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@contextmanager
def replica(
    model: TinyModel, grade: str, place: Path, log: Path
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A replica as a process of its own, and its first report of a ready engine."""
    command = [sys.executable, "-m", "tests.support.engine_replica", str(model.path), grade, str(log)]
    env = {**os.environ, "TMPDIR": str(place)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            report = json.loads(line)
            if report["state"] == "ready":
                yield process, report
                return
        raise AssertionError(f"it ended first: {log.read_text()[-2000:]}")
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@asynccontextmanager
async def runner(model: TinyModel, grade: str, link: TestLink, log: Path) -> AsyncIterator[EngineRunner]:
    """A runner in this process."""
    group = GroupConfig.model_validate({"model": model.path, "grade": grade})
    held = EngineRunner("engine-1", "eval", group, node="here", options=BootOptions(log=log), link=link)
    running = asyncio.create_task(held.run())
    try:
        yield held
    finally:
        await held.stop()
        await running


async def ready(link: TestLink, *, after: EngineReport | None = None) -> EngineReport:
    """The report of an engine that is up, on another boot than `after`."""
    old = after.nonce if after else None
    return await link.until(lambda seen: seen.state is EngineState.READY and seen.nonce != old, timeout_s=240)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("grade", GRADES)
def test_a_replica_killed_takes_its_server_with_it(model: TinyModel, grade: str, place: Path, tmp_path: Path) -> None:
    with replica(model, grade, place, tmp_path / "engine.log") as (process, report):
        family = [*tree(process.pid), *tree(report["supervisor_pid"])]
        assert report["server_pid"] in {member.pid for member in family}
        scratch = Path(psutil.Process(report["server_pid"]).cwd())
        process.kill()
        assert_gone(family)
        assert not scratch.exists()


def test_a_replica_and_its_supervisor_killed_together_take_the_server_with_them(
    model: TinyModel, place: Path, tmp_path: Path
) -> None:
    with replica(model, "fake", place, tmp_path / "engine.log") as (process, report):
        family = [*tree(process.pid), *tree(report["supervisor_pid"])]
        scratch = Path(psutil.Process(report["server_pid"]).cwd())
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(report["supervisor_pid"], signal.SIGKILL)
        process.kill()
        assert_gone(family)
        assert scratch.exists(), "nobody was left to remove it"
        with replica(model, "fake", place, tmp_path / "engine.log") as (_, later):
            assert not scratch.exists(), "the next start on the node did"
            assert Path(psutil.Process(later["server_pid"]).cwd()).exists()


@pytest.mark.parametrize("victim", ["server_pid", "supervisor_pid"])
def test_a_server_or_supervisor_killed_is_followed_by_a_new_boot_and_no_orphan(
    model: TinyModel, victim: str, tmp_path: Path
) -> None:
    async def body() -> None:
        link = TestLink()
        async with runner(model, "fake", link, tmp_path / "engine.log"):
            first = await ready(link)
            family = tree(first.supervisor_pid or 0)
            os.kill(getattr(first, victim), signal.SIGKILL)
            second = await ready(link, after=first)
            await asyncio.to_thread(assert_gone, family)
            assert second.restarts == 1
            assert second.server_pid != first.server_pid
            family = tree(second.supervisor_pid or 0)
        await asyncio.to_thread(assert_gone, family)

    asyncio.run(body())


def scheduler_of(family: list[psutil.Process]) -> psutil.Process:
    """SGLang's, among processes of which some may have ended by now."""
    for member in family:
        with suppress(psutil.NoSuchProcess):
            if "scheduler" in " ".join(member.cmdline()):
                return member
    raise AssertionError(f"no scheduler among {family}")


@pytest.mark.real
@pytest.mark.timeout(540)  # a real engine starts twice
def test_real_sglang_recovers_from_a_killed_scheduler_and_engines_with_the_same_weights_agree(
    model: TinyModel, tmp_path: Path
) -> None:
    async def body() -> None:
        link = TestLink()
        async with runner(model, "sglang-cpu", link, tmp_path / "engine.log"):
            first = await ready(link)
            pinned = await link.pin(model.path, model.manifest, "boot.1")
            family = tree(first.supervisor_pid or 0)
            scheduler_of(family).kill()
            second = await ready(link, after=first)
            await asyncio.to_thread(assert_gone, family)
            again = await link.pin(model.path, model.manifest, "boot.2")
            assert pinned.evidence is not None
            assert again.evidence is not None
            assert again.evidence.fingerprint == pinned.evidence.fingerprint
            family = tree(second.supervisor_pid or 0)
        await asyncio.to_thread(assert_gone, family)

    asyncio.run(body())


def test_the_fake_dies_of_a_truncated_shard_as_sglang_does_and_comes_back(model: TinyModel, tmp_path: Path) -> None:
    async def body() -> None:
        link = TestLink()
        async with runner(model, "fake", link, tmp_path / "engine.log"):
            first = await ready(link)
            short = truncated(model, tmp_path / "short")
            assert (await link.pin(short.path, short.manifest, "short.1")).error is PinError.DIED
            await ready(link, after=first)

    asyncio.run(body())
