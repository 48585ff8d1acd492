"""Run `program.py` of the working directory under limits: `python -I -S code_jail.py MEMORY_MB TIMEOUT_S`.

Started by `code_scorer` as a script, so it imports nothing of the project. A namespace that the kernel denies is done
without; a limit that can't be set ends it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import sys

_NEW_USER, _NEW_NET, _NEW_IPC, _NEW_PID = 0x10000000, 0x40000000, 0x08000000, 0x20000000
_FILE_BYTES = 16 << 20
_FILES = 64
_NO_NEW_PRIVILEGES = 38
REACHED_ITS_END = 77  # and not 0, which is what a program says that leaves before its tests


def main(memory_mb: int, timeout_s: float) -> int:
    """77 if it ran to its last line. What it leaves running ends with it, where the kernel has process namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    alone = libc.unshare(_NEW_USER | _NEW_NET | _NEW_IPC | _NEW_PID) == 0
    seconds = int(timeout_s) + 1
    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    if not alone:
        return _run()
    child = os.fork()  # the first process of the namespace: with it ends all that it started
    if child == 0:
        os._exit(_run())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run() -> int:
    sys.argv = ["program.py"]
    try:
        runpy.run_path("program.py", run_name="__main__")
    except BaseException:  # noqa: BLE001 - whatever ends it before its last line, sys.exit(0) too, has not passed
        return 1
    return REACHED_ITS_END


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2])))
