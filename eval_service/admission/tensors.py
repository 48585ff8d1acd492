"""The tensors of a snapshot against its config, its index and its manifest, by their headers alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from eval_service.admission.architectures import (
    EMBEDDING,
    IGNORED_SUFFIX,
    LAYER_PREFIX,
    LM_HEAD,
    HfConfig,
    Shapes,
    expected_shapes,
)
from eval_service.admission.faults import Findings
from eval_service.contract import names
from eval_service.contract.errors import SnapshotFault
from eval_service.contract.plain_files import read_plain
from eval_service.contract.safetensors_io import TensorSpan, read_spans
from eval_service.contract.snapshot import is_pickle

SUFFIX = ".safetensors"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_LAYER = re.compile(re.escape(LAYER_PREFIX) + r"([0-9]{1,9})\.")


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor as its file's header has it."""

    file: str
    span: TensorSpan

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""
        return self.span.shape


def read_headers(directory: Path, files: Collection[str], findings: Findings) -> dict[str, Held]:
    """Every tensor by name; a file whose header is not sound is a fault and adds none."""
    held: dict[str, Held] = {}
    weights = [name for name in sorted(files) if name.endswith(SUFFIX)]
    if not weights:
        pickled = any(map(is_pickle, files))
        hint = "pickles (*.bin, *.pt) are never opened; export as safetensors" if pickled else "export as safetensors"
        findings.invalid("snapshot", "there is no safetensors file", hint, may_appear=True)
    for name in weights:
        try:
            spans = read_spans(directory / name)
        except SnapshotFault as exc:
            findings.raised(exc, name)
            continue
        for span in spans:
            if span.name in held:
                findings.invalid(span.name, f"is in both {held[span.name].file} and {name}", "keep one")
            held[span.name] = Held(name, span)
    return held


def check_index(directory: Path, files: Collection[str], held: Mapping[str, Held], findings: Findings) -> None:
    """Every key of the index is in the file that it names, and the reverse."""
    if names.INDEX not in files:
        if len({tensor.file for tensor in held.values()}) > 1:
            findings.invalid(names.INDEX, "is not there, and there is more than one file", "export it with them")
        return
    try:
        weight_map = json.loads(read_plain(directory / names.INDEX))["weight_map"]
        pairs = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        findings.invalid(names.INDEX, f"can't be read ({type(exc).__name__}: {exc})", "export it anew")
        return
    for name, file in sorted(pairs.items()):
        if name not in held:
            findings.invalid(name, f"{names.INDEX} puts it in {file}, which has no such tensor", "export it anew")
        elif held[name].file != file:
            findings.invalid(name, f"{names.INDEX} puts it in {file}; it is in {held[name].file}", "export it anew")
    for name in sorted(held.keys() - pairs.keys()):
        findings.invalid(name, f"{held[name].file} has it, {names.INDEX} has not", "export the index anew")


def check_table(config: HfConfig, held: Mapping[str, Held], findings: Findings) -> None:
    """Names, shapes and dtypes are those that the config calls for."""
    expected = expected_shapes(config)
    found = {name: tensor.shape for name, tensor in held.items() if not name.endswith(IGNORED_SUFFIX)}
    if not _of_another_model(config, found, findings):
        _check_names(config, expected, found, findings)
        for name in sorted(expected.keys() & found.keys()):
            if found[name] != expected[name]:
                _report_shape(name, found[name], expected[name], findings)
    _check_dtypes(config, held, findings)


def weight_dtype(config: HfConfig, held: Mapping[str, Held]) -> str:
    """The dtype that all weights should have: the config's, else the commonest."""
    if config.dtype is not None:
        return DTYPES.get(config.dtype, config.dtype)
    counts = Counter(tensor.span.dtype for tensor in held.values())
    return counts.most_common(1)[0][0] if counts else "F32"


def _of_another_model(config: HfConfig, found: Shapes, findings: Findings) -> bool:
    """One fault in place of one a tensor, where the config plainly is not that of these weights."""
    hint = "is this the config.json of another model?"
    width = found.get(EMBEDDING, (0, config.hidden_size))[-1:]
    if width != (config.hidden_size,):
        findings.invalid(
            "hidden_size", f"config.json says {config.hidden_size}; {EMBEDDING} is {list(found[EMBEDDING])}", hint
        )
        return True
    layers = {int(match[1]) for name in found if (match := _LAYER.match(name))}
    if layers and layers != set(range(config.num_hidden_layers)):
        findings.invalid(
            "num_hidden_layers",
            f"config.json says {config.num_hidden_layers}; the files have {len(layers)}, up to {max(layers)}",
            hint,
        )
        return True
    return False


def _check_names(config: HfConfig, expected: Shapes, found: Shapes, findings: Findings) -> None:
    for name in sorted(expected.keys() - found.keys()):
        findings.invalid(name, f"the tensor is missing; {config.architecture} needs it", "export it too")
    extra = found.keys() - expected.keys()
    if config.tie_word_embeddings and LM_HEAD in extra:
        extra -= {LM_HEAD}  # allowed where it repeats the embedding; its bytes are compared when they are read
        if found[LM_HEAD] != expected[EMBEDDING]:
            _report_shape(LM_HEAD, found[LM_HEAD], expected[EMBEDDING], findings)
    for name in sorted(extra):
        findings.invalid(name, f"the tensor is extra; {config.architecture} has none of this name", "leave it out")


def _report_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], findings: Findings) -> None:
    padded = name in (EMBEDDING, LM_HEAD) and shape[1:] == expected[1:] and shape[0] > expected[0]
    message = f"has shape {list(shape)}; config.json calls for {list(expected)}"
    if padded:
        message += f": {shape[0] - expected[0]} rows of padding"
    findings.invalid(name, message, "cut it to vocab_size at export" if padded else "is it whole, and of this model?")


def _check_dtypes(config: HfConfig, held: Mapping[str, Held], findings: Findings) -> None:
    if config.dtype is not None and config.dtype not in DTYPES:
        findings.invalid("dtype", f"config.json says {config.dtype!r}", f"one of {', '.join(DTYPES)} can be checked")
        return
    wanted = weight_dtype(config, held)
    if wanted not in DTYPES.values():
        findings.invalid("dtype", f"the weights are {wanted}", f"one of {', '.join(DTYPES)} can be checked")
        return
    says = "config.json calls for" if config.dtype is not None else "the other tensors are"
    for name, tensor in sorted(held.items()):
        if tensor.span.dtype != wanted and not name.endswith(IGNORED_SUFFIX):
            findings.invalid(name, f"is {tensor.span.dtype}; {says} {wanted}", "convert it at export")
