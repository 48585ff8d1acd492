"""Every way in which a directory can be bad: damaged, in the wrong place, of another run, without safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from eval_service.admission import doctor
from eval_service.admission.checks import admit
from eval_service.admission.faults import FaultCode
from eval_service.contract import names
from eval_service.contract.errors import SnapshotFault, SnapshotMissing, SnapshotUnsafe
from eval_service.contract.manifest import read_manifest
from eval_service.contract.wire import Source
from tests.support.examined import examine, only_fault
from tests.support.tiny_snapshots import lay_out, publish, tiny

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


# --- bad directories: a sound export, damaged on storage afterwards


def no_marker(directory: Path) -> None:
    (directory / names.COMPLETE).unlink()


def no_manifest(directory: Path) -> None:
    (directory / names.MANIFEST).unlink()


def a_shard_missing(directory: Path) -> None:
    (directory / "model-00002-of-00002.safetensors").unlink()


def a_shard_short(directory: Path) -> None:
    path = directory / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 64)


def a_shard_longer(directory: Path) -> None:
    with (directory / "model-00002-of-00002.safetensors").open("ab") as file:
        file.write(b"\0" * 8)


def a_bit_flipped(directory: Path) -> None:
    path = directory / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def an_unlisted_shard(directory: Path) -> None:
    (directory / "model-00003.safetensors").write_bytes((directory / "model-00002-of-00002.safetensors").read_bytes())


def manifest_cut(directory: Path) -> None:
    path = directory / names.MANIFEST
    path.write_bytes(path.read_bytes()[:-40])


def manifest_of_another_version(directory: Path) -> None:
    path = directory / names.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 2}))


def manifest_edited(directory: Path) -> None:
    path = directory / names.MANIFEST
    table = json.loads(path.read_text())
    table["files"][0]["size_bytes"] += 1
    path.write_text(json.dumps(table))


def manifest_lists_a_path_outside(directory: Path) -> None:
    path = directory / names.MANIFEST
    path.write_text(path.read_text().replace('"config.json"', '"../config.json"'))


def a_link_that_leads_out(directory: Path) -> None:
    outside = directory.parents[2] / "outside.json"
    (directory / "config.json").rename(outside)
    (directory / "config.json").symlink_to(outside)


def a_link_to_another_snapshot_of_the_run(directory: Path) -> None:
    other = directory.parent / "kept.json"
    (directory / "config.json").rename(other)
    (directory / "config.json").symlink_to(other)


def a_name_that_is_no_text(directory: Path) -> None:
    (directory / os.fsdecode(b"model-\xff.safetensors")).write_bytes(b"")


def a_pipe(directory: Path) -> None:
    os.mkfifo(directory / "chat_template.jinja")


DIRECTORY_CASES: dict[Callable[[Path], None], tuple[str, str]] = {
    no_marker: ("ckpt_missing", names.COMPLETE),
    no_manifest: ("ckpt_missing", names.MANIFEST),
    a_shard_missing: ("snapshot_invalid", "model-00002-of-00002.safetensors"),
    a_shard_short: ("snapshot_invalid", "model-00002-of-00002.safetensors"),
    a_shard_longer: ("snapshot_invalid", "model-00002-of-00002.safetensors"),
    an_unlisted_shard: ("snapshot_invalid", "model-00003.safetensors"),
    manifest_cut: ("snapshot_invalid", names.MANIFEST),
    manifest_of_another_version: ("snapshot_invalid", "format_version"),
    manifest_edited: ("snapshot_invalid", names.MANIFEST),
    manifest_lists_a_path_outside: ("snapshot_invalid", names.MANIFEST),
    a_link_that_leads_out: ("snapshot_unsafe", "config.json"),
    a_link_to_another_snapshot_of_the_run: ("snapshot_unsafe", "config.json"),
    a_name_that_is_no_text: ("snapshot_unsafe", "model-\\udcff.safetensors"),
    a_pipe: ("snapshot_unsafe", "chat_template.jinja"),
}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return publish(tiny(), tmp_path / "root", shards=2).path


@pytest.mark.parametrize("damage", DIRECTORY_CASES, ids=lambda damage: damage.__name__)
def test_a_damaged_directory_is_refused_by_name(damage: Callable[[Path], None], published: Path) -> None:
    damage(published)
    fault = examine(published).faults[0]
    assert (fault.code.value, fault.field) == DIRECTORY_CASES[damage]


@pytest.mark.parametrize("damage", DIRECTORY_CASES, ids=lambda damage: damage.__name__)
def test_the_doctor_survives_every_damage_and_exits_1(damage: Callable[[Path], None], published: Path) -> None:
    damage(published)
    report = doctor.examine(published)
    assert doctor.exit_code(report) == 1
    assert DIRECTORY_CASES[damage] in [(fault.code.value, fault.field) for fault in report.faults]


def test_a_flipped_bit_is_found_by_the_digest_of_the_file_and_of_the_tensor(published: Path) -> None:
    a_bit_flipped(published)
    fields = {fault.field for fault in examine(published).faults}
    held = {entry.name for entry in read_manifest(published).tensors if "00001" in entry.file}
    assert "model-00001-of-00002.safetensors" in fields
    assert len(fields & held) == 1


def test_only_what_a_shared_file_system_may_still_show_is_marked_so(published: Path) -> None:
    a_shard_short(published)
    assert [fault.may_appear for fault in examine(published).faults] == [True]
    a_bit_flipped(published)
    assert any(not fault.may_appear for fault in doctor.examine(published).faults)


# --- the index


def publish_with_index(weight_map: Callable[[dict[str, str]], object], root: Path) -> Path:
    """A faithful export whose index alone was wrong when it was written."""
    sound = publish(tiny(), root, run="sound", shards=2).path
    table = json.loads((sound / names.INDEX).read_text())
    table["weight_map"] = weight_map(dict(table["weight_map"]))
    base = lay_out(tiny(), root / "models" / "base", shards=2)
    (base / names.INDEX).write_text(json.dumps(table))
    return base


INDEX_CASES: dict[str, tuple[Callable[[dict[str, str]], object], str]] = {
    "names_a_tensor_that_no_file_has": (lambda m: {**m, "ghost": "model-00001-of-00002.safetensors"}, "ghost"),
    "lacks_a_tensor_that_a_file_has": (lambda m: {k: v for k, v in m.items() if k != Q_PROJ}, Q_PROJ),
    "names_the_wrong_file": (lambda m: {**m, Q_PROJ: "model-00009-of-00002.safetensors"}, Q_PROJ),
    "is_no_table": (lambda m: [], names.INDEX),
}


@pytest.mark.parametrize("case", INDEX_CASES)
def test_an_index_that_disagrees_with_its_shards_is_refused(case: str, tmp_path: Path) -> None:
    change, field = INDEX_CASES[case]
    assert only_fault(examine(publish_with_index(change, tmp_path), source=Source.CALLER)) == (
        "snapshot_invalid",
        field,
    )


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    base = lay_out(tiny(), tmp_path / "models" / "base", shards=2)
    assert only_fault(examine(base, source=Source.CALLER)) == ("snapshot_invalid", names.INDEX)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    base = lay_out(tiny(), tmp_path / "models" / "base")
    (base / "consolidated.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    report = examine(base, source=Source.CALLER)
    assert "is in both consolidated.safetensors and model.safetensors" in doctor.render(report)


# --- where it lies


def test_a_snapshot_outside_the_roots_is_unsafe_even_if_it_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SnapshotUnsafe, match="outside the allowed roots") as caught:
        admit(tmp_path / "elsewhere", source=Source.STAGING, roots=[tmp_path / "root"])
    assert caught.value.field == "snapshot"
    assert "fleet.toml" in (caught.value.hint or "")


@pytest.mark.parametrize("path", ["{root}/r1/../../elsewhere", "relative/step_4-00000000", "{root}/a\0b"])
def test_a_path_that_leads_out_or_can_not_be_one_is_unsafe(path: str, tmp_path: Path) -> None:
    with pytest.raises(SnapshotUnsafe):
        admit(Path(path.format(root=tmp_path / "root")), source=Source.STAGING, roots=[tmp_path / "root"])


def test_a_directory_that_is_a_link_out_of_the_root_is_unsafe(tmp_path: Path) -> None:
    outside = publish(tiny(), tmp_path / "outside").path
    (tmp_path / "root" / "r1").mkdir(parents=True)
    link = tmp_path / "root" / "r1" / outside.name
    link.symlink_to(outside)
    with pytest.raises(SnapshotUnsafe):
        admit(link, source=Source.STAGING, roots=[tmp_path / "root"])


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(SnapshotFault):
        admit(tmp_path / "a", source=Source.STAGING, roots=[tmp_path])


def test_no_directory_is_ckpt_missing_for_every_source(tmp_path: Path) -> None:
    for source in Source:
        with pytest.raises(SnapshotMissing):
            admit(tmp_path / "gone", source=source, roots=[tmp_path])


def test_a_file_in_place_of_the_directory_is_ckpt_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotMissing, match="is no directory"):
        admit(tmp_path / "file", source=Source.CALLER, roots=[tmp_path])


def test_an_own_save_hf_without_its_marker_is_ckpt_missing(tmp_path: Path) -> None:
    own = lay_out(tiny(), tmp_path / "ckpt" / "step_4")
    with pytest.raises(SnapshotMissing) as caught:
        admit(own, source=Source.REUSE, roots=[tmp_path])
    assert caught.value.code == "ckpt_missing"


# --- whose it is


def test_a_snapshot_of_another_digest_run_or_step_than_asked_for_is_refused(published: Path) -> None:
    assert only_fault(examine(published, expect_digest="0" * 32)) == ("snapshot_invalid", "digest")
    assert only_fault(examine(published, run="other")) == ("snapshot_invalid", "run")
    assert only_fault(examine(published, step=5)) == ("snapshot_invalid", "step")


def test_a_renamed_snapshot_is_refused(published: Path) -> None:
    renamed = published.rename(published.with_name("step_9-" + published.name[-8:]))
    assert only_fault(examine(renamed)) == ("snapshot_invalid", "snapshot")


def test_a_canary_with_a_token_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = publish(tiny(), tmp_path / "root").path
    table = json.loads((path / names.MANIFEST).read_text())
    table["canary"]["token_ids"][0][0] = 32  # it would kill the engine
    (path / names.MANIFEST).write_text(json.dumps(table))
    assert only_fault(examine(path)) == ("snapshot_invalid", "canary")


# --- what is never opened, and how much is read


def test_pickles_alone_are_refused_with_the_way_out(tmp_path: Path) -> None:
    base = lay_out(tiny(), tmp_path / "models" / "base")
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(b"\x80\x04")
    report = examine(base, source=Source.CALLER)
    assert only_fault(report) == ("snapshot_invalid", "snapshot")
    assert "never opened" in (report.faults[0].hint or "")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "model.PTH", "state.pkl"])
def test_a_pickle_in_an_export_of_ours_is_refused_by_admission_and_doctor(published: Path, name: str) -> None:
    (published / name).write_bytes(b"\x80\x04")
    assert only_fault(examine(published)) == ("snapshot_unsafe", name)
    assert ("snapshot_unsafe", name) in [(fault.code, fault.field) for fault in doctor.examine(published).faults]


@pytest.mark.parametrize("source", [Source.STAGING, Source.REUSE, Source.CALLER])
def test_a_pickle_that_a_manifest_lists_is_refused_whoever_wrote_it(published: Path, source: Source) -> None:
    path = published / names.MANIFEST
    listed = json.loads(path.read_text())
    entry = {**listed["files"][0], "name": "weights.bin"}
    path.write_text(json.dumps({**listed, "files": [*listed["files"], entry]}))
    report = examine(published, source=source)
    assert not report.ok


def test_a_cheap_fault_saves_reading_the_bytes(tmp_path: Path, published: Path) -> None:
    a_bit_flipped(published)
    (published / names.COMPLETE).unlink()
    assert [fault.code for fault in examine(published).faults] == [FaultCode.MISSING]
    assert len(doctor.examine(published).faults) > 1
