"""A process that has imported the trainer once and forks for each launch: each is a real process of its own, without
the seconds that importing torch, megatron-core and transformers takes.

Reads a JSON line {argv, cwd, env, stdout, stderr}, answers with {"returncode": n}. A child that a signal ended has its
negative number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Zygote:
    """The handle that tests hold."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def launch(self, argv: list[str], env: Mapping[str, str], stdout: Path, stderr: Path, timeout_s: float) -> int:
        """Run `trainer.main.main(argv)` in a forked process; its exit code, or a signal's number, negative."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"argv": argv, "env": dict(env), "stdout": str(stdout), "stderr": str(stderr)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        end = threading.Timer(timeout_s, self._process.kill)
        end.start()
        try:
            return int(json.loads(self._process.stdout.readline())["returncode"])
        finally:
            end.cancel()


@contextmanager
def zygote(cwd: Path) -> Iterator[Zygote]:
    """Start one, and end it."""
    command = [sys.executable, str(Path(__file__).resolve())]
    env = {**os.environ, "PYTHONPATH": str(cwd), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Zygote(process)
        finally:
            process.kill()


def _serve() -> None:
    import transformers
    from transformers import AutoTokenizer

    import trainer.session
    from trainer.main import main

    assert all((transformers, AutoTokenizer, trainer.session))  # imported to be shared by what is forked
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(order, main)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"returncode": os.waitstatus_to_exitcode(status)}), flush=True)


def _become(order: dict[str, Any], main: Any) -> None:
    import traceback

    os.environ.update(order["env"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        code = int(main(order["argv"]))
    except BaseException:  # noqa: BLE001 - what the interpreter would do
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
