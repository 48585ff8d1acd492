"""Our safetensors bytes and the library's are the same thing, and no unsound file passes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from eval_service.contract.errors import SnapshotFault
from eval_service.contract.safetensors_io import TensorData, describe_file, hash_file, read_spans, write_safetensors
from tests.support.properties import steady

KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U8": "|u1"}
ARRAYS = st.tuples(st.sampled_from(sorted(KINDS)), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**32 - 1))


def array(kind: str, shape: list[int], seed: int) -> np.ndarray[Any, Any]:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * 9, dtype=KINDS[kind])


def data(name: str, values: np.ndarray[Any, Any]) -> TensorData:
    code = {np.dtype(kind).str: code for code, kind in KINDS.items()}[values.dtype.str]
    return TensorData(name, code, values.shape, values)


@steady
@given(st.dictionaries(st.text("abc.é", min_size=1, max_size=6), ARRAYS, max_size=5))
def test_the_library_reads_what_we_write(tmp_path_factory: pytest.TempPathFactory, made: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("ours") / "x.safetensors"
    arrays = {name: array(*spec) for name, spec in made.items()}
    entry, tensors = write_safetensors(path, [data(name, values) for name, values in arrays.items()])
    loaded = load_file(path)
    assert loaded.keys() == arrays.keys()
    for name, values in arrays.items():
        assert loaded[name].dtype == values.dtype
        assert np.array_equal(loaded[name], values)
    assert (entry, sorted(tensors, key=lambda t: t.name)) == (
        describe_file(path)[0],
        sorted(describe_file(path)[1], key=lambda t: t.name),
    )


@steady
@given(st.dictionaries(st.text("abc.é", min_size=1, max_size=6), ARRAYS, min_size=1, max_size=5))
def test_we_read_what_the_library_writes(tmp_path_factory: pytest.TempPathFactory, made: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("theirs") / "x.safetensors"
    arrays = {name: array(*spec) for name, spec in made.items()}
    path.write_bytes(save(arrays, metadata={"format": "pt"}))
    entry, tensors = describe_file(path)
    assert entry == hash_file(path)
    assert entry.xxh3_128 == xxhash.xxh3_128_hexdigest(path.read_bytes())
    assert {t.name: (t.shape, t.xxh3_128) for t in tensors} == {
        name: (values.shape, xxhash.xxh3_128_hexdigest(values.tobytes())) for name, values in arrays.items()
    }


def test_bfloat16_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    bits = np.arange(6, dtype="<u2").reshape(2, 3)
    write_safetensors(tmp_path / "x.safetensors", [TensorData("a", "BF16", (2, 3), bits)])
    (span,) = read_spans(tmp_path / "x.safetensors")
    assert (span.dtype, span.shape) == ("BF16", (2, 3))
    assert (tmp_path / "x.safetensors").read_bytes()[span.begin : span.end] == bits.tobytes()


def test_a_tensor_whose_bytes_are_not_its_shapes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a has 8 bytes"):
        write_safetensors(tmp_path / "x.safetensors", [TensorData("a", "F32", (3,), np.zeros(2, "<f4"))])


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    one = TensorData("a", "F32", (1,), np.zeros(1, "<f4"))
    with pytest.raises(ValueError, match="twice"):
        write_safetensors(tmp_path / "x.safetensors", [one, one])


def test_a_watcher_sees_every_byte_of_each_tensor(tmp_path: Path) -> None:
    values = np.arange(8, dtype="<f4")
    write_safetensors(tmp_path / "x.safetensors", [data("a", values[:3]), data("b", values[3:])])
    seen: dict[str, bytes] = {}
    describe_file(tmp_path / "x.safetensors", lambda span, chunk: seen.update({span.name: chunk}))
    assert seen == {"a": values[:3].tobytes(), "b": values[3:].tobytes()}


def raw(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(begin: int = 0, end: int = 4, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


UNSOUND: dict[str, bytes] = {
    "empty": b"",
    "shorter_than_its_length": b"\x08\0\0",
    "header_longer_than_the_file": (1 << 40).to_bytes(8, "little") + b"{}",
    "no_json": raw(b"{{{"),
    "no_utf8": raw(b'{"\xff": 1}'),
    "a_list": raw([]),
    "nested_without_end": raw(b"[" * 100_000),
    "an_entry_that_is_no_table": raw({"a": 3}),
    "no_offsets": raw({"a": {"dtype": "F32", "shape": [1]}}, b"1234"),
    "offsets_that_are_no_numbers": raw({"a": {**entry(), "data_offsets": ["x", "y"]}}, b"1234"),
    "offsets_without_end": raw(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,Infinity]}}', b"1234"),
    "a_name_that_is_no_text": raw(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"1234"),
    "overlap": raw({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"),
    "gap": raw({"a": entry(0, 4), "b": entry(6, 10)}, b"1234567890"),
    "begins_late": raw({"a": entry(2, 6)}, b"123456"),
    "negative_offset": raw({"a": entry(-4, 0)}, b""),
    "backwards": raw({"a": entry(4, 0)}, b"1234"),
    "negative_shape": raw({"a": entry(shape=[-1, -1])}, b"1234"),
    "shape_of_more_bytes": raw({"a": entry(shape=[2])}, b"1234"),
    "unknown_dtype": raw({"a": entry(dtype="F3")}, b"1234"),
    "truncated": raw({"a": entry()}, b"123"),
    "trailing_bytes": raw({"a": entry()}, b"12345"),
}


@pytest.mark.parametrize("case", UNSOUND)
@pytest.mark.parametrize("read", [read_spans, describe_file])
def test_an_unsound_file_is_a_fault_and_never_another_error(
    case: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(UNSOUND[case])
    with pytest.raises(SnapshotFault) as caught:
        read(path)
    assert caught.value.field


@pytest.mark.parametrize("length", [0, 7, 8, 50, 200])
def test_a_file_cut_at_any_place_is_a_fault(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, [data("a", np.zeros((4, 8), "<f4"))])
    assert path.stat().st_size > 200
    os.truncate(path, length)
    with pytest.raises(SnapshotFault):
        read_spans(path)


def test_a_missing_file_is_a_fault_that_names_it(tmp_path: Path) -> None:
    for read in (read_spans, describe_file, hash_file):
        with pytest.raises(SnapshotFault, match=r"x\.safetensors can't be read"):
            read(tmp_path / "x.safetensors")
