"""One boot of an engine: a server process that answers, its keys, its nonce, and what was pinned into it.

A boot is never reused: a server that ended is followed by another `Server` with another nonce.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from eval_service.contract.errors import SnapshotFault
from eval_service.contract.manifest import tensors_digest
from eval_service.contract.safetensors_io import describe_file
from eval_service.engine.errors import BootFailed, EngineError
from eval_service.engine.first import StartLock
from eval_service.engine.grades import (
    Grade,
    Keys,
    ModelFacts,
    cuda_available,
    merged_overrides,
    plan_server,
    read_model_facts,
    resolve_grade,
)
from eval_service.engine.pin import Clock, EngineFacts, Pinner
from eval_service.engine.process import ServerProcess
from eval_service.engine.sglang_api import SglangApi
from eval_service.fleet_config import GroupConfig
from eval_service.ports import free_ports

_LOOK_S = 0.1
_PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class BootOptions:
    """What a boot needs besides its group."""

    log: Path
    fleet_overrides: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"  # to bind
    advertise: str | None = None  # the host in the URL that others are told; None: `host`
    start_lock: Path | None = None  # of this host's GPU engines, so that the first starts alone


class Process(Protocol):
    """What is told of a server's process, and how it is ended (ServerProcess)."""

    exited: asyncio.Event
    exit_code: int | None
    server_pid: int | None
    supervisor_pid: int | None

    def ready(self) -> None: ...
    async def stop(self) -> None: ...


@dataclass(slots=True)
class Server:
    """A server that is up; one that is not `ours` is never started or ended."""

    nonce: str
    url: str
    keys: Keys = field(repr=False)
    process: Process
    api: SglangApi
    pinner: Pinner
    model: ModelFacts
    weight_version: str | None = None
    ours: bool = True
    start_lock: StartLock | None = None

    async def stop(self) -> None:
        """End the process group and close the connections."""
        await self.process.stop()
        if self.start_lock is not None:
            self.start_lock.close()
        await self.api.close()


async def boot_server(group: GroupConfig, options: BootOptions, clock: Clock) -> Server:
    """Start a server and wait until it answers and its boot model's fingerprint is taken.

    Raises:
        ConfigError: it can't be started as configured.
        BootFailed: it ended, or did not answer within the group's `start_timeout_s`.
    """
    # In a thread: it may import torch, and a replica whose loop stands still for that long is replaced.
    cuda = group.grade != "fake" and await asyncio.to_thread(cuda_available)
    grade = resolve_grade(group.grade, cuda=cuda)
    if grade is not Grade.SGLANG or options.start_lock is None:
        return await _boot(grade, group, options, clock)
    lock = StartLock(options.start_lock)
    try:
        await lock.turn(clock, group.start_timeout_s)
        server = await _boot(grade, group, options, clock)
    except BaseException:
        lock.close()
        raise
    lock.up()
    server.start_lock = lock
    return server


async def _boot(grade: Grade, group: GroupConfig, options: BootOptions, clock: Clock) -> Server:
    deadline = clock.monotonic() + group.start_timeout_s
    port, nccl_port = free_ports(options.host, 2)  # lost in a race all the same, the server is started again
    keys = Keys.fresh()
    plan = plan_server(
        grade,
        group,
        fleet_overrides=options.fleet_overrides,
        host=options.host,
        port=port,
        nccl_port=nccl_port,
        keys=keys,
    )
    assert group.model is not None
    model = read_model_facts(group.model, group, merged_overrides(options.fleet_overrides, group.overrides))
    async with contextlib.AsyncExitStack() as stack:
        process = await ServerProcess.start(plan, log=options.log)
        stack.push_async_callback(process.stop)
        api = await stack.enter_async_context(SglangApi(f"http://{_local(options.host)}:{port}", keys))
        facts = EngineFacts(model.vocab_size, model.dtype, checksums=grade is Grade.SGLANG)
        server = Server(
            nonce=uuid.uuid4().hex,
            url=f"http://{options.advertise or options.host}:{port}",
            keys=keys,
            process=process,
            api=api,
            pinner=Pinner(api, facts, clock),
            model=model,
        )
        digest = asyncio.create_task(asyncio.to_thread(boot_digest, group.model))
        stack.callback(digest.cancel)
        await _wait_ready(server, options, clock, deadline)
        await _note_boot(server, await digest, max(1.0, deadline - clock.monotonic()))
        stack.pop_all()
    return server


def boot_digest(model: Path) -> str | None:
    """The digest of the boot model's tensors; None where they are not sound safetensors files."""
    try:
        files = sorted(model.glob("*.safetensors"))
        return tensors_digest([entry for path in files for entry in describe_file(path)[1]])
    except SnapshotFault:
        return None


async def _wait_ready(server: Server, options: BootOptions, clock: Clock, deadline: float) -> None:
    while True:
        if server.process.exited.is_set():
            raise BootFailed(f"the server ended with {server.process.exit_code}: {log_tail(options.log)}")
        left = deadline - clock.monotonic()
        if left <= 0:
            raise BootFailed(f"the server did not answer in time; see {options.log}")
        try:
            await server.api.model_info(timeout_s=min(left, _PROBE_TIMEOUT_S))
        except EngineError:
            await clock.sleep(_LOOK_S)
        else:
            server.process.ready()
            return


async def _note_boot(server: Server, digest: str | None, timeout_s: float) -> None:
    try:
        await server.pinner.note_boot(digest, timeout_s=timeout_s)
    except EngineError as exc:
        raise BootFailed(f"the server started and can't generate: {exc}") from exc


def log_tail(log: Path, *, lines: int = 3) -> str:
    """The last lines of a server's log, for a message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return "no log"
    return " | ".join(line.strip() for line in text.splitlines()[-lines:])


def _local(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "") else host
