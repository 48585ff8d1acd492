"""Every way in which an exported model can be bad, one case each: the code, the field that is named, no other fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval_service.admission.checks import admit
from eval_service.contract.errors import SnapshotFault
from eval_service.contract.safetensors_io import TensorData
from eval_service.contract.wire import Source
from tests.support.examined import examine, only_fault
from tests.support.tiny_snapshots import Tiny, lay_out, publish, tensor, tiny

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


# Exported faithfully, so that the digests agree and only the content is wrong


def drop_tensor(model: Tiny) -> None:
    del model.tensors[Q_PROJ]


def add_tensor(model: Tiny) -> None:
    model.tensors["model.layers.1.extra.weight"] = tensor("model.layers.1.extra.weight", (4,))


def shorten_tensor(model: Tiny) -> None:
    model.tensors[Q_PROJ] = tensor(Q_PROJ, (24, 16))


def transpose_tensor(model: Tiny) -> None:
    model.tensors[Q_PROJ] = tensor(Q_PROJ, (16, 32))


def retype_tensor(model: Tiny) -> None:
    model.tensors[Q_PROJ] = tensor(Q_PROJ, (32, 16), "bfloat16")


def put_nan(model: Tiny) -> None:
    model.tensors[Q_PROJ].data[3, 5] = np.nan


def put_infinity(model: Tiny) -> None:
    model.tensors[Q_PROJ].data[0, 0] = -np.inf


def pad_embedding(model: Tiny) -> None:
    model.tensors[EMBEDDING] = tensor(EMBEDDING, (40, 16))


def untie_in_config_alone(model: Tiny) -> None:
    model.config["tie_word_embeddings"] = False


def other_head_under_tying(model: Tiny) -> None:
    model.tensors[HEAD] = tensor(HEAD, (32, 16))


def wider_config(model: Tiny) -> None:
    model.config |= {"hidden_size": 32}


def deeper_config(model: Tiny) -> None:
    model.config |= {"num_hidden_layers": 3}


def config_of_another_dtype(model: Tiny) -> None:
    model.config |= {"dtype": "bfloat16"}
    for name in list(model.tensors):
        if name != Q_PROJ:
            held = model.tensors[name]
            model.tensors[name] = tensor(name, held.shape, "bfloat16")


def unknown_architecture(model: Tiny) -> None:
    model.config["architectures"] = ["MixtralForCausalLM"]


def unmatched_model_type(model: Tiny) -> None:
    model.config["model_type"] = "llama"


def no_vocab_size(model: Tiny) -> None:
    del model.config["vocab_size"]


def vocab_size_as_text(model: Tiny) -> None:
    model.config["vocab_size"] = "32"


def own_code(model: Tiny) -> None:
    model.config["auto_map"] = {"AutoModelForCausalLM": "modeling.Evil"}


def own_tokenizer_code(model: Tiny) -> None:
    model.texts["tokenizer_config.json"] = b'{"auto_map": {"AutoTokenizer": ["tok.Evil", null]}}'


def quantized(model: Tiny) -> None:
    model.config["quantization_config"] = {"quant_method": "fp8"}


def no_tokenizer(model: Tiny) -> None:
    del model.texts["tokenizer.json"]


def no_tokenizer_config(model: Tiny) -> None:
    del model.texts["tokenizer_config.json"]


def tokenizer_of_a_larger_model(model: Tiny) -> None:
    table = json.loads(model.texts["tokenizer.json"])
    table["added_tokens"] = [{"id": 32, "content": "<|im_end|>"}]
    model.texts["tokenizer.json"] = json.dumps(table).encode()


def tokenizer_that_is_none(model: Tiny) -> None:
    model.texts["tokenizer.json"] = b'{"model": {"vocab": {"a": Infinity}}}'


def tensor_named_with_terminal_codes(model: Tiny) -> None:
    model.tensors["\x1b[2Jx"] = tensor("\x1b[2Jx", (4,))


def no_eos_anywhere(model: Tiny) -> None:
    del model.config["eos_token_id"]
    del model.texts["generation_config.json"]


def eos_beyond_the_vocabulary(model: Tiny) -> None:
    model.texts["generation_config.json"] = b'{"eos_token_id": 32}'


def broken_generation_config(model: Tiny) -> None:
    model.texts["generation_config.json"] = b"{"


MODEL_CASES: dict[Callable[[Tiny], None], tuple[str, str]] = {
    drop_tensor: ("snapshot_invalid", Q_PROJ),
    add_tensor: ("snapshot_invalid", "model.layers.1.extra.weight"),
    shorten_tensor: ("snapshot_invalid", Q_PROJ),
    transpose_tensor: ("snapshot_invalid", Q_PROJ),
    retype_tensor: ("snapshot_invalid", Q_PROJ),
    put_nan: ("snapshot_invalid", Q_PROJ),
    put_infinity: ("snapshot_invalid", Q_PROJ),
    pad_embedding: ("snapshot_invalid", EMBEDDING),
    untie_in_config_alone: ("snapshot_invalid", HEAD),
    other_head_under_tying: ("snapshot_invalid", HEAD),
    wider_config: ("snapshot_invalid", "hidden_size"),
    deeper_config: ("snapshot_invalid", "num_hidden_layers"),
    config_of_another_dtype: ("snapshot_invalid", Q_PROJ),
    unknown_architecture: ("snapshot_invalid", "architectures"),
    unmatched_model_type: ("snapshot_invalid", "model_type"),
    no_vocab_size: ("snapshot_invalid", "vocab_size"),
    vocab_size_as_text: ("snapshot_invalid", "vocab_size"),
    own_code: ("snapshot_unsafe", "auto_map"),
    own_tokenizer_code: ("snapshot_unsafe", "auto_map"),
    quantized: ("snapshot_invalid", "quantization_config"),
    no_tokenizer: ("snapshot_invalid", "tokenizer.json"),
    no_tokenizer_config: ("snapshot_invalid", "tokenizer_config.json"),
    tokenizer_of_a_larger_model: ("snapshot_invalid", "vocab_size"),
    tokenizer_that_is_none: ("snapshot_invalid", "tokenizer.json"),
    tensor_named_with_terminal_codes: ("snapshot_invalid", "\\x1b[2Jx"),
    no_eos_anywhere: ("snapshot_invalid", "eos_token_id"),
    eos_beyond_the_vocabulary: ("snapshot_invalid", "eos_token_id"),
    broken_generation_config: ("snapshot_invalid", "generation_config.json"),
}


@pytest.mark.parametrize("damage", MODEL_CASES, ids=lambda damage: damage.__name__)
def test_a_bad_model_is_one_fault_that_names_what_is_wrong(damage: Callable[[Tiny], None], tmp_path: Path) -> None:
    model = tiny()
    damage(model)
    assert only_fault(examine(publish(model, tmp_path).path)) == MODEL_CASES[damage]


@pytest.mark.parametrize("damage", MODEL_CASES, ids=lambda damage: damage.__name__)
def test_a_bad_model_in_a_callers_directory_is_the_same_fault(damage: Callable[[Tiny], None], tmp_path: Path) -> None:
    model = tiny()
    damage(model)
    report = examine(lay_out(model, tmp_path / "models" / "base"), source=Source.CALLER)
    assert only_fault(report) == MODEL_CASES[damage]
    assert report.manifest is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_found_in_every_dtype_and_the_largest_value_is_not(
    dtype: str, value: float, tmp_path: Path
) -> None:
    model = tiny(dtype=dtype)
    bits = {"float32": np.float32(value).view("<u4"), "float16": np.float16(value).view("<u2")}
    largest = {"float32": 0x7F7FFFFF, "float16": 0x7BFF, "bfloat16": 0x7F7F}[dtype]
    width = "<u4" if dtype == "float32" else "<u2"
    model.tensors[Q_PROJ].data.view(width)[0, 0] = largest
    assert examine(publish(model, tmp_path).path).ok
    bad = bits.get(dtype, np.float32(value).view("<u4") >> 16)
    model.tensors[Q_PROJ].data.view(width)[31, 15] = bad
    report = examine(publish(model, tmp_path, step=5).path)
    assert only_fault(report) == ("snapshot_invalid", Q_PROJ)
    assert "1 of its values" in report.faults[0].message


def test_the_first_fault_is_raised_and_says_how_many_more_there_are(tmp_path: Path) -> None:
    model = tiny()
    drop_tensor(model)
    put = model.tensors["model.norm.weight"]
    model.tensors["model.norm.weight"] = replace(put, shape=(8,), data=np.zeros(8, "<f4"))
    with pytest.raises(SnapshotFault, match=r"the tensor is missing.*and 1 more") as caught:
        admit(publish(model, tmp_path).path, source=Source.STAGING, roots=[tmp_path])
    assert caught.value.field == Q_PROJ


def test_a_zero_dimensional_or_unknown_dtype_tensor_is_named(tmp_path: Path) -> None:
    model = tiny()
    model.tensors[Q_PROJ] = TensorData(Q_PROJ, "I64", (), np.array(7, "<i8"))
    fields = [fault.field for fault in examine(publish(model, tmp_path).path).faults]
    assert fields == [Q_PROJ, Q_PROJ]  # its shape and its dtype
