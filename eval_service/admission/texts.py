"""The files of a snapshot that hold no weights: config.json, generation config, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from eval_service.admission.architectures import FAMILIES, HfConfig, TokenIds
from eval_service.admission.faults import Findings
from eval_service.contract.manifest import validation_message
from eval_service.contract.plain_files import read_plain

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
CHAT_TEMPLATE = "chat_template.jinja"
# What an engine reads by name, so that one which the manifest does not list would change the model unseen.
READ_BY_NAME = frozenset(
    {CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, TOKENIZER, SENTENCEPIECE, CHAT_TEMPLATE}
    | {"vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"}
)
_NO_CODE = "a snapshot may bring no code; remove it, or set service.allow_auto_map in fleet.toml"


class _GenerationConfig(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    eos_token_id: TokenIds = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the service needs to know of an admitted model."""

    architecture: str
    dtype: str  # of the weights, in safetensors' spelling: F32, BF16
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int


def read_config(
    directory: Path, files: Collection[str], findings: Findings, *, allow_auto_map: bool
) -> HfConfig | None:
    """Read `config.json`; None when it can't be used to judge the tensors."""
    table = _read_json(directory, CONFIG, files, findings, hint="a snapshot needs its model's config")
    if table is None:
        return None
    try:
        config = HfConfig.model_validate(table)
    except ValidationError as exc:
        field = str(exc.errors()[0]["loc"][0])
        findings.invalid(field, f"{CONFIG}: {validation_message(exc)}", "write it as transformers does")
        return None
    if config.auto_map is not None and not allow_auto_map:
        findings.unsafe("auto_map", f"{CONFIG} names code of its own", _NO_CODE)
    return config if _loadable(config, findings) else None


def _loadable(config: HfConfig, findings: Findings) -> bool:
    family = FAMILIES.get(config.architecture)
    if family is None:
        known = ", ".join(FAMILIES)
        findings.invalid("architectures", f"{config.architecture} can't be loaded by the fleet", f"it loads {known}")
        return False
    if config.model_type != family.model_type:
        findings.invalid(
            "model_type",
            f"{CONFIG} says {config.model_type!r}, which is not that of {config.architecture}",
            f"write {family.model_type!r}",
        )
    if config.quantization_config is not None:
        findings.invalid("quantization_config", "quantized weights can't be checked", "export the full weights")
        return False
    heads, kv = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if heads % kv:
        findings.invalid(
            "num_key_value_heads", f"{heads} query heads can't share {kv} key-value heads", "is it this model's config?"
        )
    return True


def end_ids(directory: Path, files: Collection[str], config: HfConfig, findings: Findings) -> tuple[int, ...]:
    """The ids that end a generation, all in the vocabulary: generation_config.json's, else config.json's."""
    generation = _GenerationConfig()
    if GENERATION_CONFIG in files:
        table = _read_json(directory, GENERATION_CONFIG, files, findings)
        try:
            generation = _GenerationConfig.model_validate(table or {})
        except ValidationError as exc:
            findings.invalid(GENERATION_CONFIG, validation_message(exc), "token ids are integers")
    ends = _ids(generation.eos_token_id) or _ids(config.eos_token_id)
    for number in ends:
        if not 0 <= number < config.vocab_size:
            findings.invalid(
                "eos_token_id", f"id {number} is not in the vocabulary of {config.vocab_size}", "correct the id"
            )
    if not ends:
        findings.invalid(
            "eos_token_id",
            f"neither {GENERATION_CONFIG} nor {CONFIG} says what ends an answer",
            f"write eos_token_id into {GENERATION_CONFIG}",
        )
    return ends


def check_tokenizer(
    directory: Path, files: Collection[str], vocab_size: int | None, findings: Findings, *, allow_auto_map: bool
) -> None:
    """A tokenizer is there, brings no code, and has no id beyond the vocabulary (such an id kills the engine)."""
    if TOKENIZER not in files and SENTENCEPIECE not in files:
        findings.invalid(TOKENIZER, "there is no tokenizer", f"export {TOKENIZER} (or {SENTENCEPIECE}) with the model")
    settings = _read_json(directory, TOKENIZER_CONFIG, files, findings, hint="export the tokenizer with the model")
    if settings is not None and settings.get("auto_map") is not None and not allow_auto_map:
        findings.unsafe("auto_map", f"{TOKENIZER_CONFIG} names code of its own", _NO_CODE)
    if TOKENIZER not in files:
        return
    table = _read_json(directory, TOKENIZER, files, findings)
    if table is not None and vocab_size is not None:
        _check_vocabulary(table, vocab_size, findings)


def _check_vocabulary(table: Mapping[str, Any], vocab_size: int, findings: Findings) -> None:
    try:
        highest = _highest_id(table)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as exc:
        findings.invalid(TOKENIZER, f"its vocabulary can't be read ({type(exc).__name__}: {exc})", "save it anew")
        return
    if highest >= vocab_size:
        findings.invalid(
            "vocab_size",
            f"{TOKENIZER} has token id {highest}; {CONFIG} has vocab_size {vocab_size}",
            "is the tokenizer of another model? otherwise resize the embedding",
        )


def _highest_id(table: Mapping[str, Any]) -> int:
    vocab = table["model"]["vocab"]
    ids = [int(number) for number in vocab.values()] if isinstance(vocab, dict) else list(range(len(vocab)))
    return max([*ids, *(int(token["id"]) for token in table.get("added_tokens") or [])], default=-1)


def _ids(value: TokenIds) -> tuple[int, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def _read_json(
    directory: Path, name: str, files: Collection[str], findings: Findings, hint: str = "export it with the model"
) -> dict[str, Any] | None:
    if name not in files:
        findings.invalid(name, "is not there", hint)
        return None
    try:
        table = json.loads(read_plain(directory / name))
    except OSError as exc:
        findings.invalid(name, f"can't be read: {exc.strerror}", "give the service read access")
        return None
    except (ValueError, RecursionError) as exc:
        findings.invalid(name, f"is no JSON: {exc}", "write it anew")
        return None
    if not isinstance(table, dict):
        findings.invalid(name, "is no JSON object", "write it anew")
        return None
    return table
