"""What is wrong with a request or a snapshot ends in a clear error or a recorded end, and harms nothing else."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from eval_service.contract import names
from eval_service.contract.errors import Conflict
from eval_service.contract.safetensors_io import ITEM_BYTES, TensorData, read_spans
from eval_service.contract.snapshot import SnapshotWriter
from eval_service.contract.states import PointState, Reason
from eval_service.contract.wire import DispatchReply, DispatchRequest, Granted, PointView, RunSpec, Source
from tests.support.live import DONE, SUITE, Live

pytestmark = [pytest.mark.real, pytest.mark.timeout(480)]

Tensors = dict[str, TensorData]
EXTRA = "model.layers.0.mlp.extra_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def _tensors(model: Path) -> Tensors:
    path = model / "model.safetensors"
    data = path.read_bytes()
    return {
        span.name: TensorData(span.name, span.dtype, span.shape, data[span.begin : span.end])
        for span in read_spans(path)
    }


def _put_run(live: Live, run: str) -> None:
    live.client.put_run(run, RunSpec(root=str(live.root), suites=(SUITE,), max_in_flight=100, keep=0))


def _export(
    live: Live, run: str, *, change: Callable[[Tensors], None] = lambda _: None, config: dict[str, object] | None = None
) -> Path:
    """Publish a snapshot of the base model with something changed before it was digested."""
    tensors = _tensors(live.model)
    change(tensors)
    with SnapshotWriter(live.root, run, 1, "a test's exporter 1") as writer:
        half = len(tensors) // 2
        shards = list(tensors.values())
        writer.add_weights("model-00001-of-00002.safetensors", shards[:half])
        writer.add_weights("model-00002-of-00002.safetensors", shards[half:])
        for path in live.model.iterdir():
            if path.suffix == ".json" and path.name != "config.json":
                writer.add_file(path)
        table = json.loads((live.model / "config.json").read_text()) | (config or {})
        writer.add_bytes("config.json", json.dumps(table).encode())
        return writer.publish(canary=None, dispatch=[]).path


def _dispatch(live: Live, run: str, path: Path, **fields: object) -> DispatchReply:
    asked = {"step": 1, "source": Source.STAGING, "snapshot": str(path), "reservation": str(uuid.uuid4())} | fields
    return live.client.dispatch(DispatchRequest.model_validate({"run": run, **asked}))


def _end(live: Live, run: str) -> PointView:
    [point] = live.ended(run, 1)
    return point


def _drop(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def _replace(name: str, **changes: object) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        old = tensors[name]
        fields = {"name": name, "dtype": old.dtype, "shape": old.shape, "data": old.data} | changes
        tensors[name] = TensorData(**fields)

    return change


def _nan(tensors: Tensors) -> None:
    old = tensors[UP]
    _replace(UP, data=b"\x00\x00\xc0\x7f" + old.data[4:])(tensors)


def _extra(tensors: Tensors) -> None:
    tensors[EXTRA] = TensorData(EXTRA, "F32", (2,), bytes(8))


def _short_rows(tensors: Tensors) -> None:
    rows, columns = tensors[UP].shape
    size = (rows - 8) * columns * ITEM_BYTES["F32"]
    _replace(UP, shape=(rows - 8, columns), data=tensors[UP].data[:size])(tensors)


def _other_dtype(tensors: Tensors) -> None:
    _replace(NORM, dtype="BF16", data=bytes(len(tensors[NORM].data) // 2))(tensors)


@pytest.mark.parametrize(
    ("case", "change", "config", "says"),
    [
        ("missing", _drop(NORM), None, NORM),
        ("extra", _extra, None, EXTRA),
        ("shape", _short_rows, None, UP),
        ("dtype", _other_dtype, None, NORM),
        ("nan", _nan, None, UP),
        ("config", lambda _: None, {"hidden_size": 96}, "hidden_size"),
    ],
)
def test_weights_that_are_not_the_models_are_skipped_by_name(
    live: Live, case: str, change: Callable[[Tensors], None], config: dict[str, object] | None, says: str
) -> None:
    run = f"bad-{case}"
    _put_run(live, run)
    _dispatch(live, run, _export(live, run, change=change, config=config))
    point = _end(live, run)
    assert (point.state, point.reason) == (PointState.SKIPPED, Reason.SNAPSHOT_INVALID)
    assert says in (point.detail or "")
    assert point.attempts == 0, "no engine was touched"


def _unmarked(path: Path) -> None:
    (path / names.COMPLETE).unlink()


def _shard_gone(path: Path) -> None:
    (path / "model-00002-of-00002.safetensors").unlink()


def _shard_cut(path: Path) -> None:
    shard = path / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def _index_lies(path: Path) -> None:
    index = json.loads((path / names.INDEX).read_text())
    index["weight_map"]["model.layers.7.nowhere.weight"] = "model-00001-of-00002.safetensors"
    (path / names.INDEX).write_text(json.dumps(index))


def _no_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def _link_out(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("/etc/hostname")


def _leads_out(path: Path) -> None:
    outside = path.parents[2] / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


@pytest.mark.parametrize(
    ("case", "damage", "reason", "says"),
    [
        ("marker", _unmarked, Reason.CKPT_MISSING, names.COMPLETE),
        ("short", _shard_gone, Reason.SNAPSHOT_INVALID, "model-00002-of-00002.safetensors"),
        ("truncated", _shard_cut, Reason.SNAPSHOT_INVALID, "model-00001-of-00002.safetensors"),
        ("index", _index_lies, Reason.SNAPSHOT_INVALID, names.INDEX),
        ("tokenizer", _no_tokenizer, Reason.SNAPSHOT_INVALID, "tokenizer.json"),
        ("leads-out", _leads_out, Reason.SNAPSHOT_INVALID, "outside the allowed roots"),
        ("link", _link_out, Reason.SNAPSHOT_INVALID, "config.json"),
    ],
)
def test_a_directory_that_is_not_what_it_says_is_skipped_by_name(
    live: Live, case: str, damage: Callable[[Path], None], reason: Reason, says: str
) -> None:
    run = f"bad-{case}"
    _put_run(live, run)
    path = _export(live, run)
    damage(path)
    _dispatch(live, run, path)
    point = _end(live, run)
    assert (point.state, point.reason) == (PointState.SKIPPED, reason)
    assert says in (point.detail or "")
    assert point.attempts == 0


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"step": -1}, 422, "step"),
        ({"step": "two"}, 422, "step"),
        ({"suites": ["nope"]}, 422, "suites"),
        ({"run": "nobody"}, 404, "run"),
        ({"reservation": "x"}, 422, "reservation"),
        ({"snapshot": "/etc"}, 422, "snapshot"),
        ({"snapshot": "{root}/../.."}, 422, "snapshot"),
        ({"snapshot": "relative"}, 422, "snapshot"),
    ],
)
def test_a_request_that_cannot_be_names_the_field(
    live: Live, change: dict[str, object], status: int, field: str
) -> None:
    _put_run(live, "bad")
    body = {"run": "bad", "step": 1, "reservation": str(uuid.uuid4()), "snapshot": str(live.model)} | change
    body["snapshot"] = str(body["snapshot"]).replace("{root}", str(live.root))
    response = live.http.post("/dispatch", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["field"]) == (status, field)
    assert error["message"]
    assert live.points("bad") == [], "nothing was recorded"


@pytest.mark.parametrize("run", ["a/b", "..", "../x", "", ".hidden", "a" * 200])
def test_a_run_name_that_could_leave_the_root_is_refused(live: Live, run: str) -> None:
    body = {"run": run, "step": 0, "reservation": str(uuid.uuid4())}
    response = live.http.post("/dispatch", json=body)
    assert response.status_code == 422
    assert response.json()["error"]["field"] == "run"


def test_an_unknown_field_is_refused_by_name(live: Live) -> None:
    body = {"run": "bad", "step": 0, "reservation": str(uuid.uuid4()), "snapshots": "x"}
    error = live.http.post("/dispatch", json=body).json()["error"]
    assert (error["code"], error["field"]) == ("invalid_request", "snapshots")
    assert error["hint"]


def test_one_reservation_cannot_have_two_snapshots(live: Live) -> None:
    _put_run(live, "once")
    reservation = str(uuid.uuid4())
    _dispatch(live, "once", live.model, source=Source.CALLER, reservation=reservation)
    again = _dispatch(live, "once", live.model, source=Source.CALLER, reservation=reservation)
    assert again.outcome is Granted.KNOWN
    with pytest.raises(Conflict) as caught:
        _dispatch(live, "once", live.root / "once" / "other", source=Source.CALLER, reservation=reservation)
    assert caught.value.field == "snapshot"
    assert len(live.ended("once", 1)) == 1


def test_a_token_id_beyond_the_vocabulary_is_its_samples_error_and_kills_no_engine(live: Live) -> None:
    before = {engine.id: engine.nonce for engine in live.wait_engines()}
    live.client.put_run("beyond", RunSpec(root=str(live.root), suites=("beyond",)))
    _dispatch(live, "beyond", live.model, source=Source.CALLER)
    point = _end(live, "beyond")
    assert point.state is DONE, point.detail
    assert [bool(sample.error) for sample in live.samples(point.id)] == [False, True]
    assert {engine.id: engine.nonce for engine in live.wait_engines()} == before


def test_after_all_of_it_a_sound_snapshot_is_evaluated_and_a_callers_directory_is_never_deleted(live: Live) -> None:
    caller = live.root / "somebodys"
    shutil.copytree(live.model, caller)
    _put_run(live, "sound")
    _dispatch(live, "sound", caller, source=Source.CALLER)
    point = _end(live, "sound")
    assert point.state is DONE, point.detail
    assert caller.is_dir()
    assert sorted(path.name for path in caller.iterdir()) == sorted(path.name for path in live.model.iterdir())
