"""SGLang's HTTP API as the replica uses it: every call has a timeout, every foreign error is mapped.

The admin key never leaves the replica; whoever generates gets the other one. Each call has a connection of its own, so
that a full pool elsewhere can't fail it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp

from eval_service.engine.errors import EngineDown, EngineError, EngineRefused, EngineTimeout
from eval_service.engine.grades import Keys

# /health waits 1 s for a token of its own and gives up by itself after 20 s.
HEALTH_TIMEOUT_S = 25.0
_IDLE_S = 5.0  # an engine that others ask too may never be idle


class SglangApi:
    """The API of one server.

    Args:
        url: such as `http://127.0.0.1:30000`.
        keys: of this boot.
        timeout_s: of a call that gives none.
    """

    def __init__(self, url: str, keys: Keys, *, timeout_s: float = 30.0) -> None:
        self.url = url
        self._keys = keys
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def health(self, *, timeout_s: float = HEALTH_TIMEOUT_S) -> None:
        """Return if the scheduler made progress.

        Raises:
            EngineError: it did not, or can't be reached.
        """
        await self._call("GET", "/health", timeout_s=timeout_s)

    async def model_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """`model_path` and `weight_version`, among others."""
        return await self._json("GET", "/model_info", timeout_s=timeout_s)

    async def generate(self, body: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """One `/generate` call that is not streamed."""
        return await self._json("POST", "/generate", body, timeout_s=timeout_s)

    async def input_logprobs(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> list[float]:
        """log p(token_ids[j + 1] | token_ids[: j + 1]) in nats, one shorter than `token_ids`.

        The caller has checked that every id is below the vocabulary's size: another one ends the server.
        """
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self.generate(body, timeout_s=timeout_s)
        try:
            entries = answer["meta_info"]["input_token_logprobs"][1:]
            return [float(entry[0]) for entry in entries]
        except (KeyError, TypeError, ValueError, IndexError) as exc:
            raise EngineError(f"/generate gave no log-probs: {exc!r}") from exc

    async def update_weights_from_disk(
        self, model_path: str, weight_version: str, *, timeout_s: float | None = None
    ) -> None:
        """Load another directory's weights under a label; ends what is in flight and flushes the prefix cache.

        A 200 is no proof: SGLang accepts missing and misshapen tensors. `flush_cache` with requests pending in a
        *paused* engine would end it; nothing here pauses. So would an update that comes before its scheduler has put
        away what it answered last: that is waited for.

        Raises:
            EngineRefused: no such directory, or no safetensors in it; the old weights stay.
            EngineDown: the connection was dropped; SGLang dies of a short shard or a misshapen norm.
        """
        body = {
            "model_path": model_path,
            "weight_version": weight_version,
            "abort_all_requests": True,
            "flush_cache": True,
        }
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        began = time.monotonic()
        await self._idle(limit_s / 2)
        left_s = limit_s - (time.monotonic() - began)
        answer = await self._json("POST", "/update_weights_from_disk", body, timeout_s=left_s)
        if not answer.get("success"):
            raise EngineRefused(200, str(answer.get("message")))

    async def _idle(self, limit_s: float) -> None:
        """Wait, not for long, until its scheduler has nothing at all.

        Where it does not come to that, or refuses to be asked, it is told to load all the same.
        """
        wait_s = min(_IDLE_S, limit_s / 2)
        with contextlib.suppress(EngineRefused, EngineTimeout):
            await self._call("POST", f"/flush_cache?timeout={wait_s:g}", timeout_s=min(2 * _IDLE_S, limit_s))

    async def abort_all(self, *, timeout_s: float | None = None) -> None:
        """End every request in flight: each is answered with finish_reason `abort`."""
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True}, timeout_s=timeout_s)

    async def weights_checksum(self, *, timeout_s: float | None = None) -> str:
        """One hash over every parameter of every rank.

        Raises:
            EngineRefused: on the CPU ("Torch not compiled with CUDA enabled").
        """
        answer = await self._json("POST", "/weights_checker", {"action": "checksum"}, timeout_s=timeout_s)
        checksum = answer.get("per_engine_checksum")
        if checksum is None:
            checksum = json.dumps(answer.get("ranks") or answer.get("payload"), sort_keys=True)
        return str(checksum)

    async def _json(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        text = await self._call(method, path, body, timeout_s=timeout_s)
        try:
            answer = json.loads(text)
        except ValueError as exc:
            raise EngineError(f"{path} answered with no JSON: {text[:200]!r}") from exc
        if not isinstance(answer, dict):
            raise EngineError(f"{path} answered with no object: {text[:200]!r}")
        return answer

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> str:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        key = self._keys.api if path in ("/generate", "/model_info") else self._keys.admin
        try:
            async with self._session.request(
                method,
                self.url + path,
                json=body,
                headers={"authorization": f"Bearer {key}"},
                timeout=aiohttp.ClientTimeout(total=limit_s),
                allow_redirects=False,  # the key is for this engine, and no other
            ) as answer:
                text = await answer.text()
                status = answer.status
        except TimeoutError as exc:
            raise EngineTimeout(f"{path}: no answer within {limit_s:g} s") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise EngineDown(f"{path}: {type(exc).__name__}: {exc}") from exc
        if status != 200:
            raise EngineRefused(status, f"{path}: {text[:500]}")
        return text
