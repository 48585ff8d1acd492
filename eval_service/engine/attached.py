"""An engine that is not ours: known by its URL, pinned and proven like any other, never started or ended.

It is a `Server` without a process. Whoever runs it may start it anew or load other weights at any time: that shows as a
while without an answer, or as a label that is not the pinned one; either gets a new nonce, so that what was pinned
counts as gone. Its keys come from environment variables that the configuration names, and are written nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid

from eval_service.contract.errors import ConfigError
from eval_service.engine.errors import EngineError, EngineRefused
from eval_service.engine.grades import Keys, read_model_facts
from eval_service.engine.pin import Clock, EngineFacts, Pinner
from eval_service.engine.server import BootOptions, Server
from eval_service.engine.sglang_api import SglangApi
from eval_service.fleet_config import GroupConfig

_LOOK_S = 1.0
_PROBE_TIMEOUT_S = 5.0
_NOTE_TIMEOUT_S = 60.0


class NoProcess:
    """Stands where a server's process does: there is none that could be seen to end."""

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self.exit_code: int | None = None
        self.server_pid: int | None = None
        self.supervisor_pid: int | None = None

    def ready(self) -> None:
        """Nobody is to be told."""

    async def stop(self) -> None:
        """It goes on; it is not ours to end."""
        self.exited.set()


def keys_of(group: GroupConfig) -> Keys:
    """The keys of a group's engines, from the environment.

    Raises:
        ConfigError: a variable that is named is not set.
    """
    found = []
    for field, name in (("api_key_env", group.api_key_env), ("admin_api_key_env", group.admin_api_key_env)):
        if name is not None and name not in os.environ:
            raise ConfigError(
                f"the environment variable {name} is not set", field=field, hint="it is to hold the engines' key"
            )
        found.append(os.environ[name] if name is not None else "")
    return Keys(found[0], found[1] or found[0])


class Attachment:
    """Attaches to one URL; a `Boot` of an EngineRunner.

    Args:
        url: such as `http://gpu-7:30000`.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    async def __call__(self, group: GroupConfig, options: BootOptions, clock: Clock) -> Server:
        """Wait until the engine answers, however long, and note what it holds.

        Raises:
            ConfigError: its model can't be read, or a key is not there.
        """
        assert group.model is not None
        model = read_model_facts(group.model, group, {})
        keys = keys_of(group)
        async with contextlib.AsyncExitStack() as stack:
            api = await stack.enter_async_context(SglangApi(self._url, keys))
            while not await _answers(api):
                await clock.sleep(_LOOK_S)
            facts = EngineFacts(model.vocab_size, model.dtype, checksums=await _has_checksums(api))
            pinner = Pinner(api, facts, clock)
            await pinner.note_boot(None, timeout_s=_NOTE_TIMEOUT_S)
            stack.pop_all()
        return Server(uuid.uuid4().hex, self._url, keys, NoProcess(), api, pinner, model, ours=False)


async def _answers(api: SglangApi) -> bool:
    try:
        await api.model_info(timeout_s=_PROBE_TIMEOUT_S)
        await api.health(timeout_s=_PROBE_TIMEOUT_S)
    except EngineError:
        return False
    return True


async def _has_checksums(api: SglangApi) -> bool:
    try:
        await api.weights_checksum(timeout_s=_NOTE_TIMEOUT_S)
    except EngineRefused:
        return False
    return True
