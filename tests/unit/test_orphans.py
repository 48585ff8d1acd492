"""Who counts as ended: nobody who may still hold a file or a lock."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from eval_service import orphans

# The thread that the process is named by ends, and another goes on.
_LEADERLESS = """
import ctypes, threading
threading.Thread(target=threading.Event().wait).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_zombie_with_a_thread_that_goes_on_has_not_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", _LEADERLESS], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            process = psutil.Process(child.pid)
            until = time.monotonic() + 60
            while process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < until
            assert orphans.alive(process)
        finally:
            child.kill()
        child.wait(60)
        assert not orphans.alive(process)
