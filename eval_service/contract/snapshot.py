"""Writing and describing snapshot directories.

A snapshot is written to `<root>/<run>/.partial-<nonce>/` (weights first, then the manifest, the request, the marker;
all synced) and published by one rename. A published directory is immutable: where one of the same digest is already
there it is used, and the new one is dropped.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eval_service.contract import names
from eval_service.contract.errors import SnapshotFault
from eval_service.contract.manifest import Canary, FileEntry, Manifest, TensorEntry, files_digest, read_manifest
from eval_service.contract.safetensors_io import TensorData, describe_file, hash_file, write_safetensors

_TRIES = 5
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})


@dataclass(frozen=True, slots=True)
class Published:
    """A directory that consumers may trust."""

    path: Path
    manifest: Manifest
    reused: bool  # it was there already, with the same digest


@dataclass(slots=True)
class SnapshotWriter:
    """Writes one snapshot; leaving the context without `publish` removes what was written.

    Several ranks may write into one partial directory: each calls `add_weights`, rank 0 gathers their entries through
    `absorb` and publishes.
    """

    root: Path
    run: str
    step: int
    exporter: str
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)
    files: list[FileEntry] = field(default_factory=list)
    tensors: list[TensorEntry] = field(default_factory=list)
    _expected: tuple[str, ...] = ()
    _indexed: bool = False
    _published: bool = False

    @property
    def partial(self) -> Path:
        """The directory being written."""
        return names.run_dir(self.root, self.run) / names.partial_name(self.nonce)

    def __enter__(self) -> Self:
        names.check_step(self.step)
        self.partial.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._published:
            self.abort()

    def abort(self) -> None:
        """Remove the partial directory."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def expect(self, tensors: Iterable[str]) -> None:
        """Name every tensor of the model: a snapshot that lacks one of them is not published."""
        self._expected = tuple(tensors)

    def add_weights(self, name: str, tensors: Sequence[TensorData]) -> None:
        """Write one safetensors file.

        Raises:
            OSError: disk full, among others.
        """
        entry, described = write_safetensors(self.partial / name, tensors)
        self.files.append(entry)
        self.tensors.extend(described)

    def absorb(self, files: Iterable[FileEntry], tensors: Iterable[TensorEntry]) -> None:
        """Take in what another rank has written into the same directory."""
        self.files.extend(files)
        self.tensors.extend(tensors)

    def add_file(self, source: Path) -> None:
        """Copy a file of the model that holds no weights (config, tokenizer, generation config)."""
        self.add_bytes(source.name, source.read_bytes())

    def add_bytes(self, name: str, data: bytes) -> None:
        """Write a file of the model that holds no weights.

        Raises:
            SnapshotFault: the index, which is made of what was written and never taken over from another model.
        """
        if name == names.INDEX:
            raise SnapshotFault("the index is made here", field=name, hint="don't copy the base model's")
        self._add_bytes(name, data)

    def _add_bytes(self, name: str, data: bytes) -> None:
        path = self.partial / name
        _write_synced(path, data)
        self.files.append(hash_file(path))

    def digest(self) -> str:
        """The digest that the snapshot will have; everything must have been added."""
        self._write_index()
        return files_digest(self.files)

    def publish(self, *, canary: Canary | None, dispatch: Sequence[dict[str, Any]]) -> Published:
        """Write index, manifest, request and marker, sync, and rename.

        Args:
            canary: log-probs of the exporter's own forward pass.
            dispatch: the requests (one a reservation) that the service is to take in, should nobody send them.

        Raises:
            SnapshotFault: a tensor was written twice, or none, or one that was expected was not.
            OSError: as the file system has it.
        """
        self._write_index()
        manifest = Manifest.build(
            run=self.run,
            step=self.step,
            files=self.files,
            tensors=self.tensors,
            exporter=self.exporter,
            canary=canary,
            nonce=self.nonce,
        )
        target = names.run_dir(self.root, self.run) / names.step_dir_name(self.step, manifest.digest)
        requests = [{**request, "snapshot": str(target), "digest": manifest.digest} for request in dispatch]
        _write_synced(self.partial / names.MANIFEST, manifest.model_dump_json().encode())
        _write_synced(self.partial / names.DISPATCH, json.dumps(requests).encode())
        _write_synced(self.partial / names.COMPLETE, b"")
        _sync_directory(self.partial)
        published = _rename_into_place(self.partial, target, manifest)
        self._published = True
        return published

    def _write_index(self) -> None:
        seen: set[str] = set()
        for entry in self.tensors:
            if entry.name in seen:
                raise SnapshotFault(f"{entry.name} was written twice", field=entry.name)
            seen.add(entry.name)
        if not seen:
            raise SnapshotFault("no tensor was written", field="tensors")
        if lacking := [name for name in self._expected if name not in seen]:
            more = f" (nor were {len(lacking) - 1} more)" if len(lacking) > 1 else ""
            raise SnapshotFault(f"{lacking[0]} was never written{more}", field=lacking[0])
        shards = {entry.file for entry in self.tensors}
        if len(shards) > 1 and not self._indexed:
            total = sum(entry.size_bytes for entry in self.files if entry.name in shards)
            weight_map = {entry.name: entry.file for entry in sorted(self.tensors, key=lambda entry: entry.name)}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            self._indexed = True
            self._add_bytes(names.INDEX, json.dumps(index, indent=1).encode())


def model_files(directory: Path) -> list[Path]:
    """The files that make a model, by name.

    Only regular files at the top level count. Hidden files, what an exporter writes beside the model, and pickles
    (`*.bin`, `*.pt` and the like, which are never opened) do not.

    Raises:
        SnapshotFault: the directory can't be read.
    """
    try:
        found = sorted(path for path in directory.iterdir() if path.is_file())
    except OSError as exc:
        raise SnapshotFault(f"{directory} can't be read: {exc.strerror}", field="snapshot") from exc
    return [path for path in found if is_of_model(path.name)]


def is_of_model(name: str) -> bool:
    """Whether a file of this name counts as part of a model that has no manifest."""
    beside = name.startswith(".") or name in names.BESIDE_THE_MODEL
    return not beside and not is_pickle(name)


def is_pickle(name: str) -> bool:
    """Whether a file of this name is one that runs code when it is read; never opened."""
    return Path(name).suffix.lower() in PICKLE_SUFFIXES


def describe_directory(directory: Path, *, run: str, step: int, exporter: str = "described") -> Manifest:
    """Make the manifest of a directory that has none (a base model, another exporter's); hashes every file.

    Raises:
        SnapshotFault: no safetensors file, or one that is not sound.
    """
    files: list[FileEntry] = []
    tensors: list[TensorEntry] = []
    for path in model_files(directory):
        if path.suffix == ".safetensors":
            entry, described = describe_file(path)
            tensors.extend(described)
        else:
            entry = hash_file(path)
        files.append(entry)
    if not tensors:
        raise SnapshotFault("no safetensors file in the directory", field="snapshot", hint="export as safetensors")
    return Manifest.build(run=run, step=step, files=files, tensors=tensors, exporter=exporter)


def _rename_into_place(partial: Path, target: Path, manifest: Manifest) -> Published:
    for _ in range(_TRIES):
        try:
            partial.rename(target)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            _sync_directory(target.parent)
            return Published(target, manifest, reused=False)
        if (held := _same_there(target, manifest)) is not None:
            shutil.rmtree(partial, ignore_errors=True)
            return Published(target, held, reused=True)
    raise SnapshotFault(f"{target.name} comes and goes", field="snapshot", hint="who writes there?")


def _same_there(target: Path, manifest: Manifest) -> Manifest | None:
    """The manifest of the same content; None where what was there has been taken away, as an old export is."""
    try:
        held = read_manifest(target)
        if held.digest != manifest.digest or not (target / names.COMPLETE).exists():
            raise SnapshotFault(f"{target.name} is there already and is another snapshot", field="snapshot")
    except SnapshotFault:
        if target.exists():
            raise
        return None
    return held


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
