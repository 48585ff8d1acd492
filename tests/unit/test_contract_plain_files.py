"""A pipe in a file's place is waited for by nobody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eval_service.contract import names
from eval_service.contract.errors import SnapshotFault
from eval_service.contract.manifest import read_manifest
from eval_service.contract.outbox import Outbox
from eval_service.contract.plain_files import read_plain
from eval_service.contract.safetensors_io import hash_file, read_spans


def test_a_pipe_or_a_device_in_a_files_place_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / names.MANIFEST
    os.mkfifo(pipe)
    with pytest.raises(SnapshotFault, match="no plain file"):
        read_manifest(tmp_path)
    for read in (hash_file, read_spans):
        with pytest.raises(SnapshotFault, match="no plain file"):
            read(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"no plain file|directory"):
            read_plain(path)


def test_a_pipe_in_the_outbox_is_no_request_and_hinders_no_other(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    outbox = Outbox(tmp_path)
    assert list(outbox.pending()) == []
    assert outbox.unreadable() == [tmp_path / "pipe.json"]


def test_a_plain_file_is_read_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_plain(tmp_path / "link") == b"bytes"
