"""A pin: load a snapshot into an engine and prove that it is there.

Wait until the manifest's files have their sizes on this node (a short one ends SGLang), end what is in flight, load
under a label, read the label back, then verify content: the trainer's canary must be reproduced within a tolerance, and
where other tensors were asked for than the engine held, its fingerprint must have changed. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from eval_service.admission.place import check_inside, resolve
from eval_service.contract.canary import canary_token_ids, canary_tolerance
from eval_service.contract.errors import SnapshotUnsafe
from eval_service.contract.manifest import Canary, Manifest
from eval_service.engine.errors import EngineError, EngineRefused, EngineTimeout
from eval_service.engine.protocol import PinError, PinEvidence, PinOrder

_LOOK_S = 0.1
_SERVERS_FAULT = 500  # from this HTTP status on the request is not what was wrong
_Seen = dict[tuple[int, ...], list[float]]  # log-probs of sequences, as the engine gave them since it loaded


class PinApi(Protocol):
    """What a pin needs of an engine's API (SglangApi)."""

    async def abort_all(self, *, timeout_s: float | None = None) -> None: ...
    async def update_weights_from_disk(
        self, model_path: str, weight_version: str, *, timeout_s: float | None = None
    ) -> None: ...
    async def model_info(self, *, timeout_s: float | None = None) -> dict[str, Any]: ...
    async def input_logprobs(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> list[float]: ...
    async def weights_checksum(self, *, timeout_s: float | None = None) -> str: ...


class Clock(Protocol):
    """Time, injected."""

    def monotonic(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's."""

    def monotonic(self) -> float:
        """Seconds since some start."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)


class PinFailed(Exception):
    """A pin that did not come about: `error` says at what."""

    def __init__(self, error: PinError, detail: str) -> None:
        super().__init__(f"{error}: {detail}")
        self.error = error
        self.detail = detail


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a pin must know of the engine: `checksums` where its parameters can be hashed (CUDA)."""

    vocab_size: int
    dtype: str
    checksums: bool


@dataclass(frozen=True, slots=True)
class Held:
    """What the engine was last seen to hold: the digest of tensors asked for, and the fingerprint found with it."""

    tensor_digest: str | None
    fingerprint: str


class Pinner:
    """Pins snapshots into one boot of one engine, and remembers what it holds."""

    def __init__(self, api: PinApi, facts: EngineFacts, clock: Clock) -> None:
        self.held: Held | None = None
        self._api = api
        self._facts = facts
        self._clock = clock

    async def note_boot(self, tensor_digest: str | None, *, timeout_s: float) -> None:
        """Take the fingerprint of the boot model: the first pin must change it.

        Raises:
            EngineError: the engine can't answer.
        """
        self.held = Held(tensor_digest, await self._fingerprint(self._clock.monotonic() + timeout_s, {}))

    async def pin(self, order: PinOrder) -> PinEvidence:
        """Load `order.snapshot` and prove it.

        Raises:
            PinFailed: with the reason.
        """
        started = self._clock.monotonic()
        deadline = started + order.timeout_s
        await wait_visible(
            Path(order.snapshot),
            order.manifest,
            self._clock,
            deadline=min(deadline, started + order.visibility_timeout_s),
        )
        await asyncio.to_thread(check_place, order)
        prepared = self._clock.monotonic()
        await self._mapped(lambda: self._load(order, deadline))
        loaded = self._clock.monotonic()
        fingerprint, diff = await self._mapped(lambda: self._verify(order, deadline))
        return PinEvidence(
            weight_version=order.weight_version,
            fingerprint=fingerprint,
            fingerprint_kind="checksum" if self._facts.checksums else "logprobs",
            canary_diff=diff,
            prepare_s=prepared - started,
            load_s=loaded - prepared,
            verify_s=self._clock.monotonic() - loaded,
        )

    async def _load(self, order: PinOrder, deadline: float) -> None:
        await self._api.abort_all(timeout_s=self._left(deadline))
        await self._api.update_weights_from_disk(order.snapshot, order.weight_version, timeout_s=self._left(deadline))
        info = await self._api.model_info(timeout_s=self._left(deadline))
        if info.get("weight_version") != order.weight_version:
            raise PinFailed(
                PinError.LABEL, f"/model_info says {info.get('weight_version')!r}, not {order.weight_version!r}"
            )

    async def _verify(self, order: PinOrder, deadline: float) -> tuple[str, float | None]:
        digest = order.manifest.tensor_digest
        seen: _Seen = {}
        fingerprint = await self._fingerprint(deadline, seen)
        before = self.held
        if before and before.fingerprint == fingerprint and before.tensor_digest not in (None, digest):
            raise PinFailed(PinError.UNCHANGED, f"tensors {digest[:8]} were asked for; it still holds the last ones")
        self.held = Held(digest, fingerprint)
        canary = order.manifest.canary
        return fingerprint, await self._canary_diff(canary, deadline, seen) if canary else None

    async def _canary_diff(self, canary: Canary, deadline: float, known: _Seen) -> float:
        self._check_range(canary.token_ids)
        tolerance = canary_tolerance(canary.logprobs, canary.dtype, self._facts.dtype)
        seen = [await self._logprobs(row, deadline, known) for row in canary.token_ids]
        diff = mean_abs_diff(canary.logprobs, seen)
        if not diff <= tolerance:
            raise PinFailed(
                PinError.CANARY, f"log-probs differ by {diff:.3g} nats on average; at most {tolerance:.3g} is right"
            )
        return diff

    def _check_range(self, rows: Sequence[Sequence[int]]) -> None:
        """A token id at or over the vocabulary's size would end the server."""
        worst = max(max(row) for row in rows)
        lowest = min(min(row) for row in rows)
        if worst >= self._facts.vocab_size or lowest < 0:
            raise PinFailed(
                PinError.CANARY, f"canary token ids reach from {lowest} to {worst}; vocabulary {self._facts.vocab_size}"
            )

    async def _fingerprint(self, deadline: float, seen: _Seen) -> str:
        if self._facts.checksums:
            return await self._api.weights_checksum(timeout_s=self._left(deadline))
        # A row at a time: in a batch the numbers could depend on how the scheduler cut it.
        rows = canary_token_ids(self._facts.vocab_size)
        return hash_logprobs([await self._logprobs(row, deadline, seen) for row in rows])

    async def _logprobs(self, row: Sequence[int], deadline: float, seen: _Seen) -> list[float]:
        """Ask once: the trainer's canary is of the same rows as the fingerprint, unless it was made otherwise."""
        key = tuple(row)
        if key not in seen:
            seen[key] = await self._api.input_logprobs(row, timeout_s=self._left(deadline))
        return seen[key]

    def _left(self, deadline: float) -> float:
        left = deadline - self._clock.monotonic()
        if left <= 0:
            raise EngineTimeout("the pin's deadline passed")
        return left

    @staticmethod
    async def _mapped(step: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await step()
        except EngineRefused as exc:
            error = PinError.UNAVAILABLE if exc.status >= _SERVERS_FAULT else PinError.REFUSED
            raise PinFailed(error, str(exc)) from exc
        except EngineTimeout as exc:
            raise PinFailed(PinError.TIMEOUT, str(exc)) from exc
        except EngineError as exc:
            raise PinFailed(PinError.DIED, str(exc)) from exc


async def wait_visible(directory: Path, manifest: Manifest, clock: Clock, *, deadline: float) -> None:
    """Return once every file of the manifest has its size on this node.

    Raises:
        PinFailed: one has not by the deadline, which is on `clock`.
    """
    while True:
        missing = await asyncio.to_thread(first_missing, directory, manifest)
        if missing is None:
            return
        if clock.monotonic() >= deadline:
            raise PinFailed(PinError.NOT_VISIBLE, missing)
        await clock.sleep(_LOOK_S)


def first_missing(directory: Path, manifest: Manifest) -> str | None:
    """What the first file that is absent or of another size lacks; None when all are there."""
    for entry in manifest.files:
        try:
            size = (directory / entry.name).stat().st_size
        except OSError as exc:
            return f"{entry.name}: {exc.strerror}"
        if size != entry.size_bytes:
            return f"{entry.name} has {size} of {entry.size_bytes} bytes"
    return None


def check_place(order: PinOrder) -> None:
    """Follow the links once more: since the checks a directory may have been put in the place of another.

    Raises:
        PinFailed: the snapshot or a file of it lies outside the service's roots.
    """
    try:
        place, root = check_inside(Path(order.snapshot), [Path(root) for root in order.roots])
        for entry in order.manifest.files:
            if not resolve(place / entry.name).is_relative_to(root):
                raise PinFailed(PinError.REFUSED, f"{entry.name} is a link that leads out of {root}")
    except SnapshotUnsafe as exc:
        raise PinFailed(PinError.REFUSED, exc.message) from exc


def mean_abs_diff(wanted: Sequence[Sequence[float]], seen: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference over all entries; infinite where shapes differ, there is none, or one is not finite."""
    if [len(row) for row in wanted] != [len(row) for row in seen]:
        return math.inf
    diffs = [abs(a - b) for left, right in zip(wanted, seen, strict=True) for a, b in zip(left, right, strict=True)]
    total = math.fsum(diffs) if all(math.isfinite(diff) for diff in diffs) else math.inf
    return total / len(diffs) if diffs else math.inf


def hash_logprobs(rows: Sequence[Sequence[float]]) -> str:
    """xxh3-128, in hex, of the exact numbers."""
    state = xxhash.xxh3_128(json.dumps([len(row) for row in rows]).encode())
    for row in rows:
        state.update(struct.pack(f"<{len(row)}d", *row))
    return state.hexdigest()
