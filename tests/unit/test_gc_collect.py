"""Deleting deletes what the ledger exported, and nothing else, whatever lies in the way."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from eval_service.contract import names
from eval_service.contract.outbox import Outbox
from eval_service.contract.snapshot import Published
from eval_service.contract.wire import DispatchRequest
from eval_service.gc.collect import Refused, collect, find_leftovers, remove_held, remove_leftover, tend_trash
from eval_service.gc.plan import Deletion, Leftover, LeftoverKind
from eval_service.suites.samples import write_samples
from tests.support.tiny_snapshots import publish, tiny

NONCE = "ab" * 16


def deletion_of(published: Published) -> Deletion:
    manifest = published.manifest
    assert manifest.nonce is not None
    return Deletion("s1", manifest.run, manifest.step, manifest.digest, str(published.path), manifest.nonce)


def yes() -> bool:
    return True


def tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return publish(tiny(), tmp_path / "root", nonce=NONCE)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def test_a_snapshot_is_removed_and_its_bytes_are_told(published: Published, root: Path) -> None:
    size = sum(path.stat().st_size for path in published.path.iterdir())
    assert collect(deletion_of(published), root, yes).freed_bytes == size
    assert tree(root / "r1") == []


def test_a_second_time_is_a_success_of_no_bytes(published: Published, root: Path) -> None:
    collect(deletion_of(published), root, yes)
    assert collect(deletion_of(published), root, yes).freed_bytes == 0
    shutil.rmtree(root)
    assert collect(deletion_of(published), root, yes).freed_bytes == 0


def test_a_deletion_cut_short_after_the_rename_is_finished(published: Published, root: Path) -> None:
    published.path.rename(published.path.with_name(names.trash_name(NONCE)))
    assert collect(deletion_of(published), root, yes).freed_bytes > 0
    assert tree(root / "r1") == []


def test_trash_of_an_earlier_try_does_not_stand_in_the_way(published: Published, root: Path) -> None:
    shutil.copytree(published.path, published.path.with_name(names.trash_name(NONCE)))
    collect(deletion_of(published), root, yes)
    assert tree(root / "r1") == []


def test_bytes_that_another_name_holds_are_not_counted_as_freed(published: Published, root: Path) -> None:
    weights = published.path / "model.safetensors"
    size = weights.stat().st_size
    os.link(weights, root / "held.safetensors")
    total = sum(path.stat().st_size for path in published.path.iterdir())
    assert collect(deletion_of(published), root, yes).freed_bytes == total - size
    assert (root / "held.safetensors").stat().st_size == size


@pytest.mark.parametrize("change", ["nonce", "digest", "step", "run"])
def test_a_directory_that_the_ledger_did_not_export_is_left_alone(
    change: str, published: Published, root: Path
) -> None:
    wrong = {"nonce": "cd" * 16, "digest": "0" * 32, "step": 5, "run": "r2"}[change]
    before = tree(root)
    with pytest.raises(Refused):
        collect(replace(deletion_of(published), **{change: wrong}), root, yes)  # type: ignore[arg-type]
    assert tree(root) == before


def test_a_directory_whose_manifest_is_gone_or_of_another_export_is_left_alone(
    published: Published, root: Path
) -> None:
    manifest = published.path / names.MANIFEST
    table = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**table, "nonce": "cd" * 16}))
    with pytest.raises(Refused, match="another export"):
        collect(deletion_of(published), root, yes)
    manifest.unlink()
    with pytest.raises(Refused, match="not there"):
        collect(deletion_of(published), root, yes)
    assert (published.path / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "path",
    [
        "{root}/r2/{name}",
        "{root}/r1/../r2/{name}",
        "{root}/r1/sub/{name}",
        "{root}/{name}",
        "/{name}",
        "{root}/r1",
        "{root}/r1/..",
    ],
)
def test_a_path_outside_the_runs_own_root_is_refused(path: str, published: Published, root: Path) -> None:
    """So a second run under the same root can't be touched."""
    other = publish(tiny(), root, run="r2", nonce=NONCE)
    wrong = replace(deletion_of(published), path=path.format(root=root, name=published.path.name))
    before = tree(root)
    with pytest.raises(Refused):
        collect(wrong, root, yes)
    assert tree(root) == before
    assert other.path.is_dir()


def test_links_are_never_followed(published: Published, root: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    shutil.copytree(published.path, precious)
    (published.path / "link").symlink_to(precious, target_is_directory=True)
    collect(deletion_of(published), root, yes)
    assert (precious / "model.safetensors").is_file()


def test_a_link_in_place_of_the_snapshot_is_refused(published: Published, root: Path, tmp_path: Path) -> None:
    moved = published.path.rename(tmp_path / "precious")
    published.path.symlink_to(moved, target_is_directory=True)
    with pytest.raises(Refused, match="no directory"):
        collect(deletion_of(published), root, yes)
    assert (moved / "model.safetensors").is_file()


def test_a_link_in_place_of_the_runs_root_is_refused(published: Published, root: Path, tmp_path: Path) -> None:
    moved = (root / "r1").rename(tmp_path / "precious")
    (root / "r1").symlink_to(moved, target_is_directory=True)
    with pytest.raises(Refused):
        collect(deletion_of(published), root, yes)
    assert (moved / published.path.name / "model.safetensors").is_file()


def test_a_nonce_that_is_a_path_is_refused(published: Published, root: Path) -> None:
    with pytest.raises(Refused):
        collect(replace(deletion_of(published), nonce="../../x"), root, yes)


def test_leftovers_are_found_with_their_newest_change_and_removed(published: Published, root: Path) -> None:
    run = root / "r1"
    partial, trash = run / names.partial_name(NONCE), run / names.trash_name(NONCE)
    for directory, touched_at in ((partial, 500.0), (trash, 50.0)):
        directory.mkdir()
        (directory / "a").write_bytes(b"12345")
        os.utime(directory / "a", (touched_at, touched_at))
        os.utime(directory, (100.0, 100.0))
    (run / ".partial-link").symlink_to(published.path, target_is_directory=True)
    found = find_leftovers(root, "r1")
    assert found == [
        Leftover("r1", partial.name, LeftoverKind.PARTIAL, 500.0),
        Leftover("r1", trash.name, LeftoverKind.TRASH, 100.0),
    ]
    assert [remove_leftover(leftover, root).freed_bytes for leftover in found] == [5, 5]
    assert published.path.is_dir()
    assert find_leftovers(root, "no-such-run") == []


def test_a_file_whose_writer_was_killed_before_the_rename_is_found_and_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = tmp_path / "r1", []

    def killed(*args: object, **kwargs: object) -> None:
        """At a kill nothing is tidied up: what lies there now is what stays."""
        seen.append({path: path.read_bytes() for path in run.rglob(".*") if path.is_file()})
        raise OSError("stands for the end of the process")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(OSError, match="the end"):
            write_samples(names.samples_file(tmp_path, "r1", 1, "suite", "p1"), [])
        with pytest.raises(OSError, match="the end"):
            Outbox.of(tmp_path, "r1").put(DispatchRequest(run="r1", step=1, reservation="a" * 32))
    for path, content in (seen[0] | seen[1]).items():
        path.write_bytes(content)
        os.utime(path, (7.0, 7.0))
    whole = [run / names.EVALS / "points.jsonl", run / names.OUTBOX / "a.json", run / names.EVALS / ".hidden"]
    for path in whole:
        path.write_text("whole")
    (run / names.EVALS / names.beside("linked")).symlink_to(whole[0])
    found = find_leftovers(tmp_path, "r1")
    assert [(left.kind, left.name.partition("/")[0], left.touched_at) for left in found] == [
        (LeftoverKind.HALF, names.EVALS, 7.0),
        (LeftoverKind.HALF, names.OUTBOX, 7.0),
    ]
    freed = [remove_leftover(left, tmp_path).freed_bytes for left in found]
    assert freed == [len(content) for content in (*seen[0].values(), *seen[1].values())]
    assert find_leftovers(tmp_path, "r1") == []
    assert [path.read_text() for path in whole] == ["whole"] * 3
    for name in ("evals/points.jsonl", "step_1-aaaaaaaa/.x.aaaaaaaa", f"evals/../outbox/{names.beside('a')}"):
        with pytest.raises(Refused):
            remove_leftover(Leftover("r1", name, LeftoverKind.HALF, 0.0), tmp_path)


def test_no_snapshot_can_be_removed_as_a_leftover(published: Published, root: Path) -> None:
    with pytest.raises(Refused):
        remove_leftover(Leftover("r1", published.path.name, LeftoverKind.TRASH, 0.0), root)
    with pytest.raises(Refused):
        remove_leftover(Leftover("r1", ".trash-x/../" + published.path.name, LeftoverKind.TRASH, 0.0), root)
    assert published.path.is_dir()


def test_a_snapshot_that_somebody_came_to_need_while_it_was_set_aside_is_put_back_whole(
    published: Published, root: Path
) -> None:
    before, seen = tree(root), []

    def no() -> bool:
        seen.append(published.path.exists())
        return False

    assert collect(deletion_of(published), root, no).freed_bytes == 0
    assert (tree(root), seen) == (before, [False])


@pytest.mark.parametrize(("needed", "left"), [(True, "put back"), (False, "as it is"), (None, "nothing")])
def test_trash_is_put_back_left_to_its_deletion_or_removed_as_the_ledger_says(
    published: Published, root: Path, needed: bool | None, left: str
) -> None:
    trash = published.path.with_name(names.trash_name(NONCE))
    published.path.rename(trash)
    tend_trash(
        Leftover("r1", trash.name, LeftoverKind.TRASH, 0.0),
        root,
        {} if needed is None else {published.path.name: needed},
    )
    found = {"put back": [published.path.name], "as it is": [trash.name], "nothing": []}
    assert [path.name for path in (root / "r1").iterdir()] == found[left]


def test_trash_whose_removal_had_begun_is_never_put_back(published: Published, root: Path) -> None:
    trash = published.path.with_name(names.trash_name(NONCE))
    published.path.rename(trash)
    (trash / names.MANIFEST).unlink()
    tend_trash(Leftover("r1", trash.name, LeftoverKind.TRASH, 0.0), root, {published.path.name: True})
    assert tree(root / "r1") == []


def test_hard_links_are_removed_and_what_they_are_links_to_stays(published: Published, root: Path) -> None:
    held = root / "r1" / names.held_name(NONCE)
    held.mkdir()
    for path in published.path.iterdir():
        os.link(path, held / path.name)
    before = tree(published.path)
    with pytest.raises(Refused):
        remove_held(root, "r1", published.path.name)
    remove_held(root, "r1", held.name)
    assert (held.exists(), tree(published.path)) == (False, before)
