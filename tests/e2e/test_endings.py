"""The service's end when the signal reaches more than the process that was started."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from eval_service.contract.wire import EngineState
from eval_service.demo.processes import Family
from tests.support.live import Live, wait_for

pytestmark = [pytest.mark.real, pytest.mark.destructive, pytest.mark.timeout(400)]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """The service's place for temporary files; Ray's sockets want a short path."""
    place = Path(tempfile.mkdtemp(prefix="e-"))
    yield place
    shutil.rmtree(place, ignore_errors=True)


def names_in_group(family: Family, group: int) -> Iterator[str]:
    """Of the processes; one may end meanwhile."""
    for process in family.members():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group:
                yield process.name()


def test_a_signal_to_the_whole_process_group_ends_the_service_in_a_moment_and_nothing_is_left(
    tmp_path: Path, scratch: Path
) -> None:
    """As of a job step or a container: Ray's own processes get it too, and it dies before anybody can ask it to end."""
    live = Live(tmp_path, Family(), grade="fake", bounds="1", environment={"TMPDIR": str(scratch)})
    live.build()
    try:
        live.start()
        # Not in the middle of its start: a directory that is made at that moment is nobody's yet.
        wait_for(lambda: any(engine.state is EngineState.READY for engine in live.engines()), "an engine")
        service = live.child.process.pid
        assert {"raylet", "gcs_server"} <= set(names_in_group(live.family, service))
        os.killpg(service, signal.SIGTERM)
        assert live.child.wait(120)
        assert live.child.process.returncode == 0, live.child.tail()
        wait_for(lambda: not live.family.members(), "the end of all")
        assert list(scratch.iterdir()) == []
    finally:
        live.close()
        live.family.end(grace_s=5.0)
