"""The one pass over a snapshot's bytes: hashes for the manifest and a look at every value, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eval_service.admission.architectures import EMBEDDING, LM_HEAD
from eval_service.admission.faults import Findings
from eval_service.admission.tensors import SUFFIX
from eval_service.contract.errors import SnapshotFault
from eval_service.contract.manifest import FileEntry, Manifest, TensorEntry
from eval_service.contract.safetensors_io import TensorSpan, describe_file, hash_file

# A value is NaN or infinite exactly where all bits of its exponent are set.
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}


@dataclass(frozen=True, slots=True)
class Content:
    """What the files hold, as read."""

    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


@dataclass(slots=True)
class FiniteWatch:
    """Counts, by tensor, the values that are NaN or infinite."""

    bad: dict[str, int] = field(default_factory=dict)

    def __call__(self, span: TensorSpan, chunk: bytes) -> None:
        """Look at some whole elements of a tensor."""
        if count := count_not_finite(span.dtype, chunk):
            self.bad[span.name] = self.bad.get(span.name, 0) + count


def count_not_finite(dtype: str, data: bytes) -> int:
    """How many values of a float dtype are NaN or infinite; 0 for a dtype that can hold neither or is not checked."""
    if dtype not in _EXPONENTS:
        return 0
    kind, exponent = _EXPONENTS[dtype]
    bits: NDArray[np.unsignedinteger] = np.frombuffer(data, dtype=kind)
    return int(np.count_nonzero((bits & bits.dtype.type(exponent)) == exponent))


def read_content(directory: Path, files: Iterable[str], findings: Findings) -> Content:
    """Read each file once; one that can't be read is a fault and is left out."""
    entries: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    watch = FiniteWatch()
    for name in sorted(files):
        try:
            if name.endswith(SUFFIX):
                entries[name], described = describe_file(directory / name, watch)
                tensors |= {entry.name: entry for entry in described}
            else:
                entries[name] = hash_file(directory / name)
        except SnapshotFault as exc:
            findings.raised(exc, name)
    for name, count in sorted(watch.bad.items()):
        findings.invalid(name, f"{count} of its values are NaN or infinite", "has the training diverged?")
    return Content(entries, tensors)


def check_content(content: Content, manifest: Manifest, findings: Findings) -> None:
    """What was read is what the manifest lists."""
    for listed in manifest.files:
        read = content.files.get(listed.name)
        if read is not None and read.xxh3_128 != listed.xxh3_128:
            findings.invalid(
                listed.name,
                f"its hash is {read.xxh3_128}; the manifest has {listed.xxh3_128}",
                "a published snapshot must not be changed; export it anew",
            )
    listed_tensors = {entry.name: entry for entry in manifest.tensors}
    for name, entry in sorted(content.tensors.items()):
        if listed_tensors.get(name) != entry:
            findings.invalid(name, f"in {entry.file} it is not as the manifest describes it", "export it anew")
    for name in sorted(listed_tensors.keys() - content.tensors.keys()):
        findings.invalid(
            name, f"the manifest puts it in {listed_tensors[name].file}; it is not there", "export it anew"
        )


def check_tied(tensors: Mapping[str, TensorEntry], findings: Findings) -> None:
    """Under tied embeddings an output layer may be there only if it repeats the embedding: loaders ignore it."""
    head, embedding = tensors.get(LM_HEAD), tensors.get(EMBEDDING)
    if head is not None and embedding is not None and head.xxh3_128 != embedding.xxh3_128:
        findings.invalid(
            LM_HEAD,
            f"tie_word_embeddings is true, and it differs from {EMBEDDING}",
            "leave it out, or set tie_word_embeddings to false",
        )
