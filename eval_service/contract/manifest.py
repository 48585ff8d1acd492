"""The manifest of a snapshot: files, tensors, digests and the canary.

`digest` covers the model's files (config, tokenizer, generation config, weights) and no time, run or nonce, so the
same weights exported twice have the same digest. `tensor_digest` covers names, dtypes, shapes and bytes of the tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self, TypeVar

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from eval_service.contract.errors import SnapshotFault
from eval_service.contract.names import MANIFEST, NONCE
from eval_service.contract.plain_files import read_plain

FORMAT_VERSION = 1


def check_file_name(name: str) -> str:
    """Return `name` if it can be that of a file in the snapshot's own directory.

    Raises:
        ValueError: a separator, a dot alone, an empty or long name, or one that is no text.
    """
    if name in (".", "..") or not 0 < len(name) < 256 or any(c in name for c in "/\\\0"):
        raise ValueError("must be the name of a file in the snapshot's own directory")
    name.encode()  # a name that is no UTF-8 fails here, with a ValueError
    return name


FileName = Annotated[str, AfterValidator(check_file_name)]
_Entry = TypeVar("_Entry", "FileEntry", "TensorEntry")


class FileEntry(BaseModel):
    """One file of the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: FileName
    size_bytes: int = Field(ge=0)
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")


class TensorEntry(BaseModel):
    """One tensor, and the file that holds it. `dtype` is in safetensors' spelling (F32, BF16)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    dtype: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    file: FileName
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")


class Canary(BaseModel):
    """Log-probs of fixed token sequences from the exporter's own forward pass.

    `logprobs[i][j]` is log p(token_ids[i][j + 1] | token_ids[i][: j + 1]), natural log, so each row is one shorter.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: str = Field(description="of the forward pass: float32 or bfloat16; the bounds are of it")
    token_ids: tuple[tuple[int, ...], ...] = Field(min_length=1)
    logprobs: tuple[tuple[Annotated[float, Field(allow_inf_nan=False)], ...], ...]

    @model_validator(mode="after")
    def _rows_match(self) -> Self:
        if [len(row) - 1 for row in self.token_ids] != [len(row) for row in self.logprobs]:
            raise ValueError("each row of logprobs must be one shorter than its token ids")
        if any(len(row) < 2 for row in self.token_ids):
            raise ValueError("each row needs two token ids or more: one alone has no log-prob to compare")
        return self


class Manifest(BaseModel):
    """`manifest.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int = FORMAT_VERSION
    run: str
    step: int = Field(ge=0)
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    digest: str
    tensor_digest: str
    canary: Canary | None = None
    exporter: str = Field(description="name and version of what wrote it")
    nonce: str | None = Field(default=None, pattern=NONCE.pattern, description="of the export; GC compares it")

    @model_validator(mode="after")
    def _lists_agree(self) -> Self:
        files = {entry.name for entry in self.files}
        for entries in (self.files, self.tensors):
            name, count = next(iter(Counter(entry.name for entry in entries).most_common(1)), ("", 0))
            if count > 1:
                raise ValueError(f"{name} is listed twice")
        for entry in self.tensors:
            if entry.file not in files:
                raise ValueError(f"tensor {entry.name} lies in {entry.file}, which is not listed")
        return self

    @classmethod
    def build(
        cls,
        *,
        run: str,
        step: int,
        files: Iterable[FileEntry],
        tensors: Iterable[TensorEntry],
        exporter: str,
        canary: Canary | None = None,
        nonce: str | None = None,
    ) -> Self:
        """Sort, digest and assemble.

        Raises:
            SnapshotFault: a file or tensor is listed twice, or a tensor lies in a file that is not listed.
        """
        files, tensors = _sorted(files), _sorted(tensors)
        try:
            return cls(
                run=run,
                step=step,
                files=files,
                tensors=tensors,
                digest=files_digest(files),
                tensor_digest=tensors_digest(tensors),
                canary=canary,
                exporter=exporter,
                nonce=nonce,
            )
        except ValidationError as exc:
            raise SnapshotFault(validation_message(exc), field=MANIFEST) from exc


def validation_message(exc: ValidationError) -> str:
    """The first fault that pydantic found, on one line."""
    fault = exc.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where}: {fault['msg']}" if where else fault["msg"]


def _sorted(entries: Iterable[_Entry]) -> tuple[_Entry, ...]:
    return tuple(sorted(entries, key=lambda entry: entry.name))


def files_digest(files: Iterable[FileEntry]) -> str:
    """xxh3-128, in hex, over the sorted (name, size, hash)."""
    state = xxhash.xxh3_128()
    for entry in sorted(files, key=lambda entry: entry.name):
        state.update(f"{entry.name}\0{entry.size_bytes}\0{entry.xxh3_128}\n".encode())
    return state.hexdigest()


def tensors_digest(tensors: Iterable[TensorEntry]) -> str:
    """xxh3-128, in hex, over the sorted (name, dtype, shape, hash): the files they lie in do not matter."""
    state = xxhash.xxh3_128()
    for entry in sorted(tensors, key=lambda entry: entry.name):
        state.update(f"{entry.name}\0{entry.dtype}\0{list(entry.shape)}\0{entry.xxh3_128}\n".encode())
    return state.hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read a directory's manifest.

    Raises:
        SnapshotFault: it is not there, is not JSON, has other fields, or its digests are not of its own lists.
    """
    try:
        data = read_plain(directory / MANIFEST)
    except FileNotFoundError as exc:
        raise SnapshotFault(f"{MANIFEST} is not there", field=MANIFEST) from exc
    except OSError as exc:
        raise SnapshotFault(f"{MANIFEST} can't be read: {exc.strerror}", field=MANIFEST) from exc
    return parse_manifest(data)


def parse_manifest(data: bytes) -> Manifest:
    """Check the bytes of a manifest.

    Raises:
        SnapshotFault: it is not JSON, has other fields, or its digests are not of its own lists.
    """
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as exc:
        raise SnapshotFault(f"{MANIFEST} is not one of ours: {validation_message(exc)}", field=MANIFEST) from exc
    if manifest.format_version != FORMAT_VERSION:
        raise SnapshotFault(f"format version {manifest.format_version} is not known", field="format_version")
    if manifest.digest != files_digest(manifest.files) or manifest.tensor_digest != tensors_digest(manifest.tensors):
        raise SnapshotFault("the digests are not those of the listed files and tensors", field=MANIFEST)
    return manifest
