"""What a pin proves, and what it calls each way of going wrong."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from eval_service.contract.canary import canary_token_ids, canary_tolerance
from eval_service.contract.manifest import Canary, Manifest
from eval_service.engine.errors import EngineDown, EngineError, EngineRefused, EngineTimeout
from eval_service.engine.fake import fake_logprobs
from eval_service.engine.pin import EngineFacts, PinFailed, Pinner, mean_abs_diff
from eval_service.engine.protocol import PinError, PinEvidence, PinOrder
from tests.support.engine_model import VOCAB_SIZE, TinyModel, make_model


@dataclass
class Clock:
    """Time passes only while somebody sleeps; `on_sleep` is what happens meanwhile."""

    now: float = 100.0
    slept: int = 0
    on_sleep: dict[int, Any] = field(default_factory=dict)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1
        if self.slept in self.on_sleep:
            self.on_sleep[self.slept]()


@dataclass
class Api:
    """An engine in memory: loads a snapshot's digest, answers from it."""

    digests: dict[str, str]
    holds: str = "boot"
    label: str = "default"
    error: EngineError | None = None
    keeps_label: bool = False
    keeps_weights: bool = False
    noise: float = 0.0
    asked: list[Sequence[int]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    async def abort_all(self, *, timeout_s: float | None = None) -> None:
        self.calls.append("abort")

    async def update_weights_from_disk(
        self, model_path: str, weight_version: str, *, timeout_s: float | None = None
    ) -> None:
        self.calls.append("update")
        if self.error is not None:
            raise self.error
        self.label = self.label if self.keeps_label else weight_version
        self.holds = self.holds if self.keeps_weights else self.digests[model_path]

    async def model_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        self.calls.append("info")
        return {"weight_version": self.label}

    async def input_logprobs(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> list[float]:
        self.asked.append(token_ids)
        return [value + self.noise for value in fake_logprobs(self.holds, token_ids)]

    async def weights_checksum(self, *, timeout_s: float | None = None) -> str:
        return f"sum-{self.holds}"


@dataclass
class World:
    """Two snapshots, an engine, a clock."""

    a: TinyModel
    b: TinyModel
    api: Api
    clock: Clock
    pinner: Pinner

    def pin(self, model: TinyModel, manifest: Manifest | None = None, **order: Any) -> PinEvidence:
        wanted = PinOrder(str(model.path), manifest or model.proven(), "label", **order)
        return asyncio.run(self.pinner.pin(wanted))

    def failure(self, model: TinyModel, manifest: Manifest | None = None, **order: Any) -> PinFailed:
        with pytest.raises(PinFailed) as caught:
            self.pin(model, manifest, **order)
        return caught.value


def _world(tmp_path: Path, *, dtype: str = "float32", checksums: bool = False) -> World:
    a, b = make_model(tmp_path / "a", seed=1), make_model(tmp_path / "b", seed=2)
    api = Api({str(model.path): model.manifest.tensor_digest for model in (a, b)})
    clock = Clock()
    pinner = Pinner(api, EngineFacts(VOCAB_SIZE, dtype, checksums), clock)
    asyncio.run(pinner.note_boot("boot", timeout_s=5))
    return World(a, b, api, clock, pinner)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return _world(tmp_path)


def test_a_good_pin_ends_what_is_in_flight_loads_reads_back_and_gives_evidence(world: World) -> None:
    evidence = world.pin(world.a)
    assert world.api.calls == ["abort", "update", "info"]
    assert (evidence.weight_version, evidence.canary_diff, evidence.fingerprint_kind) == ("label", 0.0, "logprobs")
    assert world.pin(world.b).fingerprint != evidence.fingerprint
    assert world.pin(world.a).fingerprint == evidence.fingerprint


def test_what_has_come_to_lie_outside_the_roots_since_the_checks_is_not_loaded(world: World, tmp_path: Path) -> None:
    roots = (str(tmp_path),)
    world.pin(world.b, roots=roots)
    world.api.calls.clear()
    weights = next(world.a.path / entry.name for entry in world.a.manifest.files if "safetensors" in entry.name)
    weights.rename(tmp_path / "elsewhere")
    with TemporaryDirectory() as outside:
        moved = Path(outside) / weights.name
        moved.write_bytes((tmp_path / "elsewhere").read_bytes())
        weights.symlink_to(moved)
        assert world.failure(world.a, roots=roots).error is PinError.REFUSED
        world.a.path.rename(Path(outside) / "a")
        world.a.path.symlink_to(Path(outside) / "a")
        assert "outside the allowed roots" in world.failure(world.a, roots=roots).detail
    assert world.api.calls == []


def test_with_cuda_the_fingerprint_is_the_parameters_checksum(tmp_path: Path) -> None:
    world = _world(tmp_path, checksums=True)
    evidence = world.pin(world.a)
    assert evidence.fingerprint_kind == "checksum"
    assert evidence.fingerprint == f"sum-{world.a.manifest.tensor_digest}"


def test_other_tensors_with_the_same_fingerprint_are_unchanged(world: World) -> None:
    world.api.keeps_weights = True
    assert world.failure(world.a, world.a.manifest).error is PinError.UNCHANGED
    assert world.failure(world.a, world.a.manifest).error is PinError.UNCHANGED
    world.api.keeps_weights = False
    world.pin(world.a)
    world.api.keeps_weights = True
    assert world.failure(world.b, world.b.manifest).error is PinError.UNCHANGED


def test_the_same_tensors_may_keep_their_fingerprint(world: World) -> None:
    world.pin(world.a)
    world.api.keeps_weights = True
    world.pin(world.a)


def test_a_canary_off_by_more_than_the_tolerance_fails(world: World) -> None:
    canary = world.a.proven().canary
    assert canary is not None
    tolerance = canary_tolerance(canary.logprobs, "float32")
    world.api.noise = tolerance * 0.9
    world.pin(world.a)
    world.api.noise = tolerance * 1.1
    failure = world.failure(world.a)
    assert failure.error is PinError.CANARY
    assert f"at most {tolerance:.3g}" in failure.detail


def test_the_looser_dtype_of_engine_and_canary_sets_the_tolerance(tmp_path: Path) -> None:
    world = _world(tmp_path, dtype="bfloat16")
    world.api.noise = 0.01
    assert world.pin(world.a).canary_diff == pytest.approx(0.01)
    world.api.noise = 0.5
    assert world.failure(world.b).error is PinError.CANARY


def test_canary_ids_beyond_the_vocabulary_are_never_sent(world: World) -> None:
    row = (1, VOCAB_SIZE)
    canary = Canary(dtype="float32", token_ids=(row,), logprobs=((-1.0,),))
    assert world.failure(world.a, world.a.with_canary(canary)).error is PinError.CANARY
    assert row not in world.api.asked
    assert set(world.api.asked) <= set(canary_token_ids(VOCAB_SIZE))


def test_a_label_that_does_not_come_back_fails(world: World) -> None:
    world.api.keeps_label = True
    assert world.failure(world.a).error is PinError.LABEL


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineRefused(400, "no"), PinError.REFUSED),
        (EngineRefused(500, "oops"), PinError.UNAVAILABLE),
        (EngineRefused(503, "busy"), PinError.UNAVAILABLE),
        (EngineTimeout("late"), PinError.TIMEOUT),
        (EngineDown("gone"), PinError.DIED),
        (EngineError("nonsense"), PinError.DIED),
    ],
)
def test_every_error_of_the_engine_has_its_reason(world: World, error: EngineError, reason: PinError) -> None:
    world.api.error = error
    assert world.failure(world.a).error is reason


def test_a_file_that_comes_late_is_waited_for(world: World) -> None:
    path = world.a.path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    world.clock.on_sleep = {3: lambda: path.write_bytes(whole)}
    assert world.pin(world.a).prepare_s == pytest.approx(0.3)


def test_a_short_file_is_never_loaded(world: World) -> None:
    path = world.a.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    failure = world.failure(world.a, visibility_timeout_s=1.0)
    assert failure.error is PinError.NOT_VISIBLE
    assert "model.safetensors has" in failure.detail
    assert world.api.calls == []


def test_the_deadline_of_the_pin_bounds_the_wait_for_files(world: World) -> None:
    (world.a.path / "config.json").unlink()
    started = world.clock.now
    assert world.failure(world.a, timeout_s=2.0, visibility_timeout_s=60.0).error is PinError.NOT_VISIBLE
    assert world.clock.now - started == pytest.approx(2.0, abs=0.2)


def test_after_a_failed_canary_the_next_pin_must_still_change_the_engine(world: World) -> None:
    wrong = world.a.with_canary(world.b.proven().canary)
    assert world.failure(world.a, wrong).error is PinError.CANARY
    world.api.keeps_weights = True
    assert world.failure(world.b, world.b.manifest).error is PinError.UNCHANGED


def test_numbers_that_are_not_finite_or_not_there_are_infinitely_wrong() -> None:
    assert mean_abs_diff([[1.0]], [[math.nan]]) == math.inf
    assert mean_abs_diff([[1.0]], [[1.0, 2.0]]) == math.inf
    assert mean_abs_diff([[1.0, 2.0]], [[1.5, 2.0]]) == 0.25


def test_a_difference_over_nothing_is_no_proof() -> None:
    assert mean_abs_diff([[]], [[]]) == math.inf
