"""Safetensors files as bytes: a streamed write that hashes as it goes, and headers without the data.

The library's own writer wants every tensor in memory at once and tells no hash; its own reader wants a framework.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from eval_service.contract.errors import SnapshotFault
from eval_service.contract.manifest import FileEntry, TensorEntry
from eval_service.contract.plain_files import open_plain

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_MAX_HEADER_BYTES = 100 << 20
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where one tensor's bytes lie in its file; `begin` and `end` count from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


Watch = Callable[[TensorSpan, bytes], None]


@dataclass(frozen=True, slots=True)
class TensorData:
    """A tensor to be written: `data` is C-contiguous little-endian bytes of `shape` x `dtype`, or gives them when its
    turn comes (so that no more than one tensor need be held)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any  # anything with the buffer protocol, or a callable that returns that

    @property
    def size_bytes(self) -> int:
        """Bytes that dtype and shape call for."""
        return _size_bytes(self.name, self.dtype, self.shape)


def write_safetensors(path: Path, tensors: Sequence[TensorData]) -> tuple[FileEntry, list[TensorEntry]]:
    """Write the header, then each tensor's bytes, hashing both; synced to the disk before it returns.

    Raises:
        ValueError: a tensor whose bytes are not what its dtype and shape call for.
        OSError: as the file system has it (disk full, say); the short file is left to the caller.
    """
    header = _header(tensors)
    whole = xxhash.xxh3_128(header)
    size = len(header)
    entries = []
    with path.open("xb") as file, ThreadPoolExecutor(1) as hashing:
        file.write(header)
        for tensor in tensors:
            view = _bytes_of(tensor.data() if callable(tensor.data) else tensor.data)
            if view.nbytes != tensor.size_bytes:
                raise ValueError(f"{tensor.name} has {view.nbytes} bytes; {tensor.dtype} {tensor.shape} wants others")
            # Beside the write, and done before the next tensor is asked for: no more than one is held.
            hashed = hashing.submit(_hash_into, whole, view)
            for chunk in _chunks(view):
                file.write(chunk)
            size += view.nbytes
            entries.append(
                TensorEntry(
                    name=tensor.name,
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    file=path.name,
                    xxh3_128=hashed.result(),
                )
            )
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name=path.name, size_bytes=size, xxh3_128=whole.hexdigest()), entries


def _hash_into(whole: xxhash.xxh3_128, view: memoryview) -> str:
    """Hash a tensor's bytes by themselves and into the file's, chunk by chunk, while they are in the cache."""
    own = xxhash.xxh3_128()
    for chunk in _chunks(view):
        own.update(chunk)
        whole.update(chunk)
    return own.hexdigest()


def read_spans(path: Path) -> list[TensorSpan]:
    """Read a file's header and check it against the file's size; nothing of the data is read.

    Raises:
        SnapshotFault: truncated, not safetensors, or spans that overlap or leave gaps.
    """
    with _faults_of(path), open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        return _read_spans(file, size, path.name)


def describe_file(path: Path, watch: Watch | None = None) -> tuple[FileEntry, list[TensorEntry]]:
    """Hash a file and each tensor in it, in one pass.

    Args:
        watch: is shown each tensor's bytes as they are read, in chunks of whole elements.

    Raises:
        SnapshotFault: as `read_spans`.
    """
    with _faults_of(path), open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        spans = sorted(_read_spans(file, size, path.name), key=lambda span: span.begin)
        first = spans[0].begin if spans else size
        file.seek(0)
        whole = xxhash.xxh3_128(file.read(first))
        entries = []
        for span in spans:
            own = xxhash.xxh3_128()
            for chunk in _read_chunks(file, span.end - span.begin):
                own.update(chunk)
                whole.update(chunk)
                if watch is not None:
                    watch(span, chunk)
            entries.append(
                TensorEntry(
                    name=span.name, dtype=span.dtype, shape=span.shape, file=path.name, xxh3_128=own.hexdigest()
                )
            )
    return FileEntry(name=path.name, size_bytes=size, xxh3_128=whole.hexdigest()), entries


def hash_file(path: Path) -> FileEntry:
    """Hash any file."""
    state = xxhash.xxh3_128()
    with _faults_of(path), open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        for chunk in _read_chunks(file, size):
            state.update(chunk)
    return FileEntry(name=path.name, size_bytes=size, xxh3_128=state.hexdigest())


def _header(tensors: Sequence[TensorData]) -> bytes:
    at = 0
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor in tensors:
        if tensor.name in table:
            raise ValueError(f"{tensor.name} is given twice")
        end = at + tensor.size_bytes
        table[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    body = json.dumps(table, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def _read_spans(file: BinaryIO, size: int, name: str) -> list[TensorSpan]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise SnapshotFault(f"{name} is truncated or no safetensors file", field=name)
    table = json.loads(file.read(length))
    if not isinstance(table, dict):
        raise SnapshotFault(f"{name} has no safetensors header", field=name)
    start = 8 + length
    spans = [_span(key, cast("dict[str, Any]", value), start) for key, value in table.items() if key != "__metadata__"]
    at = start
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        if span.begin != at or span.end - span.begin != _size_bytes(span.name, span.dtype, span.shape):
            raise SnapshotFault(f"{name}: {span.name} does not lie where its dtype and shape put it", field=span.name)
        at = span.end
    if at != size:
        raise SnapshotFault(f"{name} has {size} bytes; its header calls for {at} (truncated?)", field=name)
    return spans


def _span(name: str, value: dict[str, Any], start: int) -> TensorSpan:
    name.encode()  # a lone surrogate could be neither printed nor kept
    begin, end = (int(offset) for offset in value["data_offsets"])
    return TensorSpan(name, str(value["dtype"]), tuple(int(n) for n in value["shape"]), start + begin, start + end)


def _size_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in ITEM_BYTES:
        raise SnapshotFault(f"dtype {dtype} is not known", field=name, hint=f"one of {', '.join(ITEM_BYTES)}")
    size = ITEM_BYTES[dtype]
    for extent in shape:
        if extent < 0:
            raise SnapshotFault(f"a shape of {list(shape)} can't be", field=name)
        size *= extent
    return size


def _bytes_of(data: Any) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a view without bytes can't be cast


def _chunks(view: memoryview) -> Iterator[memoryview]:
    return (view[at : at + _CHUNK_BYTES] for at in range(0, view.nbytes, _CHUNK_BYTES))


def _read_chunks(file: BinaryIO, size: int) -> Iterable[bytes]:
    left = size
    while left > 0:
        chunk = file.read(min(left, _CHUNK_BYTES))
        if not chunk:
            raise SnapshotFault("the file became shorter while it was read")
        left -= len(chunk)
        yield chunk


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise SnapshotFault(f"{path.name} can't be read: {exc.strerror}", field=path.name) from exc
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as exc:
        raise SnapshotFault(f"{path.name} has no sound safetensors header: {exc}", field=path.name) from exc
