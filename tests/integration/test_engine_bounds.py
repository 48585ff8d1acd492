"""What an engine's processes may use up, hold and know: logs, scratch space, time to start, secrets."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from eval_service.engine import process
from eval_service.engine.errors import BootFailed
from eval_service.engine.grades import ServerPlan
from eval_service.engine.process import ServerProcess
from eval_service.suites.scoring import ScorerPool
from tests.support.processes import eventually, tree

NOISY = (
    "import sys, time\nwhile True:\n    sys.stderr.write('x' * 999 + '\\n'); sys.stderr.flush(); time.sleep(0.001)\n"
)


def _plan(code: str) -> ServerPlan:
    return ServerPlan(command=(sys.executable, "-c", code), env={}, boot="")


def test_the_log_of_an_engine_that_writes_without_end_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MAX_LOG_BYTES", 100_000)
    log = tmp_path / "engine-eval-1.log"
    kept = tmp_path / "engine-eval-1.log.1"
    cut: list[bytes] = []

    def is_cut() -> bool:
        kept_bytes = kept.stat().st_size  # first: until it is cut the log has what is kept of it, and more
        cut.append(log.read_bytes())
        return 0 < len(cut[-1]) < kept_bytes

    async def body() -> None:
        server = await ServerProcess.start(_plan(NOISY), log=log)
        try:
            await asyncio.to_thread(eventually, lambda: log.exists() and log.stat().st_size > 100_000)
            # The supervisor looks every few seconds, and whenever it is spoken to.
            server.ready()
            await asyncio.to_thread(eventually, kept.exists)
            await asyncio.to_thread(eventually, is_cut)
            assert cut[-1][:1] == b"x", "no hole where the server goes on writing"
        finally:
            await server.stop()

    asyncio.run(body())


@pytest.mark.parametrize("after", range(4))
def test_who_is_cancelled_just_as_the_server_starts_is_cancelled_and_leaves_no_process(
    after: int, tmp_path: Path
) -> None:
    """A replica that is stopped in that moment would go on to wait for its server, and never end."""
    made: list[ServerProcess] = []

    class Told(ServerProcess):
        def _hear(self, event: dict[str, object]) -> None:
            super()._hear(event)
            if event["event"] == "started":
                made.append(self)
                cancelling.append(asyncio.create_task(cancel()))

    async def cancel() -> bool:
        for _ in range(after):
            await asyncio.sleep(0)
        return starting[0].cancel()

    starting: list[asyncio.Task[ServerProcess]] = []
    cancelling: list[asyncio.Task[bool]] = []

    async def body() -> None:
        starting.append(asyncio.create_task(Told.start(_plan("import time; time.sleep(600)"), log=tmp_path / "log")))
        await asyncio.wait(starting, timeout=60)
        given = await cancelling[0]
        assert starting[0].cancelled() == given
        if not given:
            await made[0].stop()
        assert not psutil.pid_exists(made[0].server_pid or 0)

    asyncio.run(body())


@pytest.mark.parametrize("after", range(3))
def test_who_is_cancelled_just_as_the_server_is_gone_is_cancelled(after: int, tmp_path: Path) -> None:
    """A replica that is stopped in that moment would start another one."""

    async def body() -> None:
        server = await ServerProcess.start(_plan("import time; time.sleep(600)"), log=tmp_path / "log")
        stopping = asyncio.create_task(server.stop())
        for _ in range(5):
            await asyncio.sleep(0)
        await server.exited.wait()
        for _ in range(after):
            await asyncio.sleep(0)
        given = stopping.cancel()
        await asyncio.wait([stopping], timeout=60)
        assert stopping.cancelled() == given

    asyncio.run(body())


def test_a_place_for_temporary_files_whose_name_leaves_sockets_no_room_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would end with a line about a socket's path in its log alone."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(BootFailed, match=r"TMPDIR: .*x is \d+ bytes too long for the server's sockets"):
        asyncio.run(ServerProcess.start(_plan(""), log=tmp_path / "engine.log"))
    assert not list(long.iterdir())


def test_of_former_engines_logs_the_newest_are_kept(tmp_path: Path) -> None:
    for number in range(process.MAX_LOGS + 5):
        path = tmp_path / f"engine-eval-{number}.log"
        path.write_text("x")
        os.utime(path, (number, number))
    (tmp_path / "service.log").write_text("not an engine's")
    process.prune_logs(tmp_path)
    assert not (tmp_path / "engine-eval-4.log").exists()
    assert (tmp_path / "engine-eval-5.log").exists()
    assert len(list(tmp_path.iterdir())) == process.MAX_LOGS + 1


@pytest.mark.parametrize("started", [False, True])
def test_a_replica_that_hangs_while_it_starts_is_ended_so_that_it_is_replaced(started: bool) -> None:
    """It is stopped, as a hung one: no thread of its own could have ended it."""
    code = (
        "import os, signal\nfrom eval_service.engine.start_guard import StartGuard\n"
        "print('up', flush=True)\n"
        f"guard = StartGuard({60.0 if started else 0.5})\n"
        + ("guard.disarm()\n" if started else "")
        + "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    replica = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert replica.stdout is not None
        assert replica.stdout.readline() == b"up\n"
        if started:
            eventually(lambda: psutil.Process(replica.pid).status() == psutil.STATUS_STOPPED)
            assert psutil.Process(replica.pid).children() == [], "nobody is left who could end it"
        else:
            assert replica.wait(30) == -signal.SIGKILL
    finally:
        replica.kill()
        replica.wait()
        assert replica.stdout is not None
        replica.stdout.close()


def test_neither_engines_nor_scorers_inherit_rays_token_or_anybodys_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "THEIR_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD")
    for name in secrets:
        monkeypatch.setenv(name, "do-not-tell")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    log = tmp_path / "engine.log"
    others = set(psutil.Process().children())  # of fixtures, whose processes come and go

    async def body() -> None:
        server = await ServerProcess.start(_plan("import time; time.sleep(60)"), log=log)
        pool = ScorerPool(1, 10.0)
        try:
            await pool.score("exact", ["a"], ["a"])
            ours = set(psutil.Process().children()) - others
            children = [each for child in ours for each in tree(child.pid)]
            assert {server.supervisor_pid, server.server_pid} < {child.pid for child in children}
            assert len(children) == 3
            for child in children:
                assert "do-not-tell" not in child.environ().values(), child.cmdline()
            assert any(child.environ().get("TOKENIZERS_PARALLELISM") for child in children)
        finally:
            await asyncio.to_thread(pool.close)
            await server.stop()

    asyncio.run(body())
