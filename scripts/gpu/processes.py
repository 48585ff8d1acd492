"""What every GPU script needs: a budget of time, children that end with it, a service that is waited for, versions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from eval_service import ports

ROOT = Path(__file__).resolve().parents[2]
HOST = {
    # A machine that shares its NVLink switches with others must not be asked for multicast.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # A virtual machine whose memory grows as it is used looks full to Ray, which would end engines.
    "RAY_memory_monitor_refresh_ms": "0",
}


class Clock:
    """The time that is left."""

    def __init__(self, budget_s: float) -> None:
        self.until = time.monotonic() + budget_s

    def left(self, at_most: float) -> float:
        return max(1.0, min(at_most, self.until - time.monotonic()))


def say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


def environment() -> dict[str, str]:
    paths = [str(ROOT), *(part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)]
    return {
        **os.environ,
        **HOST,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }


class Process:
    """A child in a process group of its own, with a log."""

    def __init__(self, argv: list[str], log: Path, cwd: Path = ROOT, **env: str) -> None:
        self.log = log
        self._file = log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, *argv],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**environment(), **env},
            start_new_session=True,
        )

    def wait(self, timeout_s: float) -> int | None:
        """The exit code; None: it had to be ended."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            return None

    def end(self, patience_s: float = 15.0) -> None:
        """SIGTERM to the process, which ends what it started; then SIGKILL to the group. No patience: SIGKILL alone."""
        if patience_s:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10.0)
        self._file.close()

    def tail(self, size: int = 3000) -> str:
        return self.log.read_text(errors="replace")[-size:]


def wait_for_engines(client: Any, service: Process, count: int, timeout_s: float) -> None:
    """Wait until so many engines are ready.

    Raises:
        RuntimeError: the service has ended, or the time is up.
    """
    from eval_service.contract.errors import EvalfleetError

    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if service.process.poll() is not None:
            raise RuntimeError(f"the service ended: {service.tail()}")
        with suppress(EvalfleetError):
            if sum(str(engine.state) in ("ready", "pinning") for engine in engines(client)) >= count:
                return
        time.sleep(0.5)
    raise RuntimeError(f"{count} engines did not come in time")


def engines(client: Any) -> list[Any]:
    """Of the eval group."""
    return [engine for group in client.fleet().groups if group.name == "eval" for engine in group.engines]


def engine_log(work: Path) -> str:
    logs = sorted((work / "state").rglob("*.log"), key=lambda path: path.stat().st_mtime)
    return logs[-1].read_text(errors="replace")[-3000:] if logs else ""


def versions() -> dict[str, Any]:
    import platform
    from importlib import metadata

    found: dict[str, Any] = {"python": platform.python_version()}
    for name in ("torch", "megatron-core", "transformers", "sglang", "ray", "safetensors", "evalfleet"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    with suppress(Exception):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    return found


def free_port() -> int:
    return ports.free_port("127.0.0.1")
