"""The digest depends on the content alone; a manifest that can't be true is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from eval_service.contract import names
from eval_service.contract.errors import SnapshotFault
from eval_service.contract.manifest import Canary, FileEntry, Manifest, TensorEntry, read_manifest
from tests.support.tiny_snapshots import publish, tiny

HASHES = [f"{number:032x}" for number in range(4)]
FILES = [FileEntry(name=f"f{number}", size_bytes=number, xxh3_128=HASHES[number]) for number in range(4)]
TENSORS = [
    TensorEntry(name=f"t{number}", dtype="F32", shape=(number, 2), file="f0", xxh3_128=HASHES[number])
    for number in range(4)
]


def build(files: list[FileEntry] = FILES, tensors: list[TensorEntry] = TENSORS, **changes: Any) -> Manifest:
    given = {"run": "r", "step": 1, "exporter": "e", **changes}
    return Manifest.build(files=files, tensors=tensors, **given)


def test_the_digest_has_no_time_run_step_or_nonce_in_it(tmp_path: Path) -> None:
    one = publish(tiny(), tmp_path, run="r1", step=4).manifest
    other = publish(tiny(), tmp_path, run="r2", step=8).manifest
    assert one.nonce != other.nonce
    assert (one.digest, one.tensor_digest) == (other.digest, other.tensor_digest)


def test_the_digest_does_not_depend_on_the_order_of_files_or_tensors() -> None:
    for seed in range(5):
        files, tensors = random.Random(seed).sample(FILES, 4), random.Random(seed).sample(TENSORS, 4)
        assert build(files, tensors) == build()


@pytest.mark.parametrize("change", [{"name": "g"}, {"size_bytes": 9}, {"xxh3_128": "f" * 32}])
def test_the_digest_changes_with_any_file(change: dict[str, Any]) -> None:
    other = [*FILES[:3], FILES[3].model_copy(update=change)]
    assert build(other).digest != build().digest


@pytest.mark.parametrize(
    "change", [{"name": "u"}, {"dtype": "BF16"}, {"shape": (2, 3)}, {"xxh3_128": "f" * 32}], ids=str
)
def test_the_tensor_digest_changes_with_any_tensor(change: dict[str, Any]) -> None:
    other = [*TENSORS[:3], TENSORS[3].model_copy(update=change)]
    assert build(tensors=other).tensor_digest != build().tensor_digest


def test_the_tensor_digest_does_not_depend_on_the_sharding(tmp_path: Path) -> None:
    whole, split = publish(tiny(), tmp_path, run="a").manifest, publish(tiny(), tmp_path, run="b", shards=3).manifest
    assert whole.tensor_digest == split.tensor_digest
    assert whole.digest != split.digest


def test_a_canary_does_not_change_the_digest() -> None:
    canary = Canary(dtype="float32", token_ids=((1, 2),), logprobs=((-1.0,),))
    assert build(canary=canary).digest == build().digest


def test_a_manifest_survives_being_written_and_read(tmp_path: Path) -> None:
    published = publish(tiny(), tmp_path, shards=2)
    assert read_manifest(published.path) == published.manifest


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\\b", "a\0", "x" * 256, "\udc80"])
def test_no_listed_file_can_lie_outside_the_snapshot(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        FileEntry(name=name, size_bytes=0, xxh3_128="0" * 32)


def test_a_listing_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(SnapshotFault, match="f0 is listed twice"):
        build([*FILES, FILES[0]])
    with pytest.raises(SnapshotFault, match="t1 is listed twice"):
        build(tensors=[*TENSORS, TENSORS[1]])
    with pytest.raises(SnapshotFault, match="f0, which is not listed"):
        build(FILES[1:])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": -1}, "step"),
        ({"nonce": "../x"}, "nonce"),
        ({"surprise": 1}, "surprise"),
        ({"digest": "0" * 32}, "digests"),
        ({"tensor_digest": "0" * 32}, "digests"),
        ({"format_version": 9}, "version 9"),
        ({"files": []}, "not listed"),
    ],
    ids=str,
)
def test_a_manifest_that_can_not_be_true_is_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / names.MANIFEST).write_text(json.dumps({**build().model_dump(mode="json"), **change}))
    with pytest.raises(SnapshotFault, match=named):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("token_ids", "logprobs"),
    [(((1, 2),), ((),)), (((1, 2),), ((-1.0,), (-1.0,))), ((), ()), (((1, 2),), ((float("nan"),),)), (((1,),), ((),))],
)
def test_a_canary_that_proves_nothing_is_refused(token_ids: Any, logprobs: Any) -> None:
    with pytest.raises(ValueError):
        Canary(dtype="float32", token_ids=token_ids, logprobs=logprobs)
