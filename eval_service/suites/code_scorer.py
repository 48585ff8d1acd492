"""The scorer that runs what a model wrote, in a process that is locked down as far as the kernel allows.

Of its own: a session, an empty directory that is deleted afterwards, an empty environment, limits of processor time,
memory, file size and open files; and, where the kernel lets an ordinary user have them, namespaces of its own, without
a network and with no process but its own. It is no sandbox against somebody who means harm: it shares the host's
kernel, user and file system.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from eval_service.scratch import Kind, scratch
from eval_service.suites.code_jail import REACHED_ITS_END
from eval_service.suites.scorers import scorer

_JAIL = Path(__file__).with_name("code_jail.py")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)


@scorer("code", metric="passed")
def passed(output: str, answer: str, *, run_timeout_s: float = 10.0, memory_mb: int = 512) -> float:
    """1 if the program runs to its last line in time; one that leaves before, with whatever code, has not."""
    source = program_in(output) + "\n\n" + answer + "\n"
    with scratch(Kind.CODE) as directory:
        (directory / "program.py").write_text(source, encoding="utf-8", errors="replace")
        return float(_ends_well(str(directory), run_timeout_s, memory_mb))


def program_in(output: str) -> str:
    """The last fenced block of Python, or all of the output where there is none."""
    blocks = _FENCE.findall(output)
    return blocks[-1] if blocks else output


def _ends_well(directory: str, timeout_s: float, memory_mb: int) -> bool:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_JAIL), str(memory_mb), str(timeout_s)],
        cwd=directory,
        env={"HOME": directory, "TMPDIR": directory, "PATH": os.defpath, "LANG": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout_s) == REACHED_ITS_END
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
