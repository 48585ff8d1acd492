"""A snapshot is published whole or not at all, and a published one is never changed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval_service.contract import names, snapshot
from eval_service.contract.errors import SnapshotFault
from eval_service.contract.manifest import Manifest, read_manifest
from eval_service.contract.safetensors_io import TensorData
from eval_service.contract.snapshot import SnapshotWriter, describe_directory
from tests.support.tiny_snapshots import canary, lay_out, publish, request, tiny

ONE = TensorData("a", "F32", (2,), np.ones(2, "<f4"))
NONCE = "ab" * 16


def entries(root: Path, run: str = "r1") -> list[str]:
    return sorted(path.name for path in (root / run).iterdir())


def test_publishing_leaves_one_complete_directory_and_no_partial(tmp_path: Path) -> None:
    published = publish(tiny(), tmp_path, shards=2)
    assert entries(tmp_path) == [published.path.name]
    assert published.path.name == f"step_4-{published.manifest.digest[:8]}"
    held = {path.name for path in published.path.iterdir()}
    assert held == {entry.name for entry in published.manifest.files} | names.BESIDE_THE_MODEL
    assert names.INDEX in held


def test_the_published_request_names_its_own_directory_and_digest(tmp_path: Path) -> None:
    published = publish(tiny(), tmp_path)
    (listed,) = json.loads((published.path / names.DISPATCH).read_text())
    assert (listed["snapshot"], listed["digest"]) == (str(published.path), published.manifest.digest)


def test_the_manifest_is_what_describing_the_directory_finds(tmp_path: Path) -> None:
    published = publish(tiny(), tmp_path, shards=2)
    described = describe_directory(published.path, run="r1", step=4)
    assert (described.files, described.tensors) == (published.manifest.files, published.manifest.tensors)
    assert described.digest == published.manifest.digest


def test_an_exception_removes_the_partial_directory(tmp_path: Path) -> None:
    def export() -> None:
        with SnapshotWriter(tmp_path, "r1", 4, "e") as writer:
            writer.add_weights("model.safetensors", [ONE])
            raise RuntimeError("the rank died")

    with pytest.raises(RuntimeError, match="the rank died"):
        export()
    assert entries(tmp_path) == []


def test_leaving_without_publishing_removes_the_partial_directory(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path, "r1", 4, "e") as writer:
        writer.add_weights("model.safetensors", [ONE])
    assert entries(tmp_path) == []


def test_the_same_content_published_twice_is_used_and_not_written_again(tmp_path: Path) -> None:
    first = publish(tiny(), tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in first.path.iterdir()}
    second = publish(tiny(), tmp_path)
    assert (first.reused, second.reused) == (False, True)
    assert second.path == first.path
    assert second.manifest.nonce == first.manifest.nonce, "GC must know it by the nonce of the export that is there"
    assert {path.name: path.stat().st_mtime_ns for path in first.path.iterdir()} == before
    assert entries(tmp_path) == [first.path.name]


def test_other_content_at_the_same_step_is_another_directory(tmp_path: Path) -> None:
    first, second = publish(tiny(), tmp_path), publish(tiny(seed=1), tmp_path)
    assert first.path != second.path
    assert len(entries(tmp_path)) == 2


def test_a_published_path_that_holds_something_else_is_never_overwritten(tmp_path: Path) -> None:
    published = publish(tiny(), tmp_path)
    (published.path / names.COMPLETE).unlink()
    with pytest.raises(SnapshotFault, match="another snapshot"):
        publish(tiny(), tmp_path)
    assert entries(tmp_path) == [published.path.name]


def test_the_same_content_is_published_where_its_old_export_is_deleted_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in the way of the rename, and is gone when one looks whose it is."""
    old = publish(tiny(), tmp_path)

    def gone(directory: Path) -> Manifest:
        directory.rename(tmp_path / "trash")
        return read_manifest(directory)

    monkeypatch.setattr(snapshot, "read_manifest", gone)
    again = publish(tiny(), tmp_path)
    assert (again.path, again.reused) == (old.path, False)
    assert again.manifest.nonce != old.manifest.nonce
    assert (again.path / names.COMPLETE).is_file()


@pytest.mark.parametrize("failing", ["weights", "config", "marker", "rename"])
def test_a_full_disk_at_any_moment_leaves_nothing_behind(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    real = snapshot._write_synced

    def full_at(path: Path, data: bytes) -> None:
        if path.name == {"config": "config.json", "marker": names.COMPLETE}.get(failing):
            full()
        real(path, data)

    monkeypatch.setattr(snapshot, "_write_synced", full_at)
    if failing == "weights":
        monkeypatch.setattr(os, "fsync", full)
    if failing == "rename":
        monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        publish(tiny(), tmp_path)
    assert entries(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from eval_service.contract.safetensors_io import TensorData
from eval_service.contract.snapshot import SnapshotWriter

with SnapshotWriter(Path(sys.argv[1]), "r1", 4, "e", nonce=sys.argv[2]) as writer:
    writer.add_weights("model.safetensors", [TensorData("a", "F32", (2,), np.ones(2, "<f4"))])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trainer_killed_while_writing_leaves_a_partial_that_no_reader_takes_for_a_snapshot(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), NONCE], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert entries(tmp_path) == [names.partial_name(NONCE)]
    assert names.parse_step_dir(names.partial_name(NONCE)) is None
    assert not (tmp_path / "r1" / names.partial_name(NONCE) / names.COMPLETE).exists()
    assert publish(tiny(), tmp_path).path.is_dir(), "a resumed run is not in its way"


def test_ranks_write_into_one_directory_and_the_first_publishes(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path, "r1", 4, "e", nonce=NONCE) as first:
        other = SnapshotWriter(tmp_path, "r1", 4, "e", nonce=NONCE)
        first.add_weights("model-00001-of-00002.safetensors", [ONE])
        other.add_weights("model-00002-of-00002.safetensors", [TensorData("b", "F32", (2,), np.ones(2, "<f4"))])
        first.absorb(other.files, other.tensors)
        published = first.publish(canary=None, dispatch=[])
    assert [entry.name for entry in published.manifest.tensors] == ["a", "b"]
    index = json.loads((published.path / names.INDEX).read_text())
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }


@pytest.mark.parametrize("tensors", [[], ["a.safetensors", "b.safetensors"]], ids=["none", "the_same_twice"])
def test_no_tensor_or_one_written_twice_is_refused(tensors: list[str], tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path, "r1", 4, "e") as writer:
        for name in tensors:
            writer.add_weights(name, [ONE])
        with pytest.raises(SnapshotFault):
            writer.publish(canary=canary(), dispatch=[request("r1", 4).model_dump(mode="json")])
    assert entries(tmp_path) == []


def test_what_is_described_leaves_out_pickles_hidden_files_and_directories(tmp_path: Path) -> None:
    base = lay_out(tiny(), tmp_path / "base")
    before = describe_directory(base, run="r", step=0)
    (base / "pytorch_model.bin").write_bytes(b"x")
    (base / ".gitattributes").write_text("x")
    (base / "original").mkdir()
    assert describe_directory(base, run="r", step=0) == before


@pytest.mark.parametrize("made", [True, False])
def test_a_directory_without_weights_can_not_be_described(made: bool, tmp_path: Path) -> None:
    if made:
        (tmp_path / "base").mkdir()
    with pytest.raises(SnapshotFault):
        describe_directory(tmp_path / "base", run="r", step=0)


def test_a_name_that_leads_out_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="can't name a run"), SnapshotWriter(tmp_path, "../x", 4, "e"):
        pass
    assert os.listdir(tmp_path) == []


def test_a_tensor_that_the_writer_drops_fails_the_publication_by_its_name(tmp_path: Path) -> None:
    """The index lists keys that no shard contains: here the index is made of what was written, and what is lacking
    is never published."""
    with SnapshotWriter(tmp_path, "r", 1, "tests") as writer:
        writer.expect(["kept", "dropped", "dropped too"])
        writer.add_weights("model.safetensors", [TensorData("kept", "U8", (1,), b"x")])
        with pytest.raises(SnapshotFault, match=r"dropped: dropped was never written \(nor were 1 more\)"):
            writer.publish(canary=None, dispatch=())
    assert not list((tmp_path / "r").iterdir())


def test_the_index_of_a_base_model_can_not_be_taken_over(tmp_path: Path) -> None:
    """A tied lm_head that is kept in the base model's index becomes an empty tensor."""
    with SnapshotWriter(tmp_path, "r", 1, "tests") as writer:
        for shard in "ab":
            writer.add_weights(f"{shard}.safetensors", [TensorData(shard, "U8", (1,), b"x")])
        with pytest.raises(SnapshotFault, match="the index is made here"):
            writer.add_bytes(names.INDEX, b'{"weight_map": {"lm_head.weight": "b.safetensors"}}')
        path = writer.publish(canary=None, dispatch=()).path
    assert set(json.loads((path / names.INDEX).read_bytes())["weight_map"]) == {"a", "b"}
