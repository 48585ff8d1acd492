"""Every way in which a snapshot can be bad, one case each: the code, the field that is named, and no other fault."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval_service.admission import doctor
from eval_service.admission.checks import Report, admit, find_faults
from eval_service.admission.faults import FaultCode
from eval_service.contract import names
from eval_service.contract.errors import SnapshotFault, SnapshotMissing, SnapshotUnsafe
from eval_service.contract.manifest import read_manifest
from eval_service.contract.safetensors_io import TensorData
from eval_service.contract.wire import Source
from tests.support.tiny_snapshots import Tiny, lay_out, publish, tensor, tiny

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def examine(directory: Path, **changes: object) -> Report:
    return find_faults(directory, **{"source": Source.STAGING, "roots": [directory.parents[1]], **changes})  # type: ignore[arg-type]


def only_fault(report: Report) -> tuple[str, str]:
    assert len(report.faults) == 1, doctor.render(report)
    return report.faults[0].code.value, report.faults[0].field


# --- bad models: exported faithfully, so that the digests agree and only the content is wrong


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


# --- bad directories: a sound export, damaged on storage afterwards


def no_marker(directory: Path) -> None:
    (directory / names.COMPLETE).unlink()


def no_manifest(directory: Path) -> None:
    (directory / names.MANIFEST).unlink()


def a_shard_missing(directory: Path) -> None:
    (directory / "model-00002-of-00002.safetensors").unlink()


def a_shard_short(directory: Path) -> None:
    path = directory / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 64)


def a_shard_longer(directory: Path) -> None:
    with (directory / "model-00002-of-00002.safetensors").open("ab") as file:
        file.write(b"\0" * 8)


def a_bit_flipped(directory: Path) -> None:
    path = directory / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def an_unlisted_shard(directory: Path) -> None:
    (directory / "model-00003.safetensors").write_bytes((directory / "model-00002-of-00002.safetensors").read_bytes())


def manifest_cut(directory: Path) -> None:
    path = directory / names.MANIFEST
    path.write_bytes(path.read_bytes()[:-40])


def manifest_of_another_version(directory: Path) -> None:
    path = directory / names.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 2}))


def manifest_edited(directory: Path) -> None:
    path = directory / names.MANIFEST
    table = json.loads(path.read_text())
    table["files"][0]["size_bytes"] += 1
    path.write_text(json.dumps(table))


def manifest_lists_a_path_outside(directory: Path) -> None:
    path = directory / names.MANIFEST
    path.write_text(path.read_text().replace('"config.json"', '"../config.json"'))


def a_link_that_leads_out(directory: Path) -> None:
    outside = directory.parents[2] / "outside.json"
    (directory / "config.json").rename(outside)
    (directory / "config.json").symlink_to(outside)


def a_link_to_another_snapshot_of_the_run(directory: Path) -> None:
    other = directory.parent / "kept.json"
    (directory / "config.json").rename(other)
    (directory / "config.json").symlink_to(other)


def a_name_that_is_no_text(directory: Path) -> None:
    (directory / os.fsdecode(b"model-\xff.safetensors")).write_bytes(b"")


def a_pipe(directory: Path) -> None:
    os.mkfifo(directory / "chat_template.jinja")


DIRECTORY_CASES: dict[Callable[[Path], None], tuple[str, str]] = {
    no_marker: ("ckpt_missing", names.COMPLETE),
    no_manifest: ("ckpt_missing", names.MANIFEST),
    a_shard_missing: ("snapshot_invalid", "model-00002-of-00002.safetensors"),
    a_shard_short: ("snapshot_invalid", "model-00002-of-00002.safetensors"),
    a_shard_longer: ("snapshot_invalid", "model-00002-of-00002.safetensors"),
    an_unlisted_shard: ("snapshot_invalid", "model-00003.safetensors"),
    manifest_cut: ("snapshot_invalid", names.MANIFEST),
    manifest_of_another_version: ("snapshot_invalid", "format_version"),
    manifest_edited: ("snapshot_invalid", names.MANIFEST),
    manifest_lists_a_path_outside: ("snapshot_invalid", names.MANIFEST),
    a_link_that_leads_out: ("snapshot_unsafe", "config.json"),
    a_link_to_another_snapshot_of_the_run: ("snapshot_unsafe", "config.json"),
    a_name_that_is_no_text: ("snapshot_unsafe", "model-\\udcff.safetensors"),
    a_pipe: ("snapshot_unsafe", "chat_template.jinja"),
}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return publish(tiny(), tmp_path / "root", shards=2).path


@pytest.mark.parametrize("damage", DIRECTORY_CASES, ids=lambda damage: damage.__name__)
def test_a_damaged_directory_is_refused_by_name(damage: Callable[[Path], None], published: Path) -> None:
    damage(published)
    fault = examine(published).faults[0]
    assert (fault.code.value, fault.field) == DIRECTORY_CASES[damage]


@pytest.mark.parametrize("damage", DIRECTORY_CASES, ids=lambda damage: damage.__name__)
def test_the_doctor_survives_every_damage_and_exits_1(damage: Callable[[Path], None], published: Path) -> None:
    damage(published)
    report = doctor.examine(published)
    assert doctor.exit_code(report) == 1
    assert DIRECTORY_CASES[damage] in [(fault.code.value, fault.field) for fault in report.faults]


def test_a_flipped_bit_is_found_by_the_digest_of_the_file_and_of_the_tensor(published: Path) -> None:
    a_bit_flipped(published)
    fields = {fault.field for fault in examine(published).faults}
    held = {entry.name for entry in read_manifest(published).tensors if "00001" in entry.file}
    assert "model-00001-of-00002.safetensors" in fields
    assert len(fields & held) == 1


def test_only_what_a_shared_file_system_may_still_show_is_marked_so(published: Path) -> None:
    a_shard_short(published)
    assert [fault.may_appear for fault in examine(published).faults] == [True]
    a_bit_flipped(published)
    assert any(not fault.may_appear for fault in doctor.examine(published).faults)


# --- the index


def publish_with_index(weight_map: Callable[[dict[str, str]], object], root: Path) -> Path:
    """A faithful export whose index alone was wrong when it was written."""
    sound = publish(tiny(), root, run="sound", shards=2).path
    table = json.loads((sound / names.INDEX).read_text())
    table["weight_map"] = weight_map(dict(table["weight_map"]))
    base = lay_out(tiny(), root / "models" / "base", shards=2)
    (base / names.INDEX).write_text(json.dumps(table))
    return base


INDEX_CASES: dict[str, tuple[Callable[[dict[str, str]], object], str]] = {
    "names_a_tensor_that_no_file_has": (lambda m: {**m, "ghost": "model-00001-of-00002.safetensors"}, "ghost"),
    "lacks_a_tensor_that_a_file_has": (lambda m: {k: v for k, v in m.items() if k != Q_PROJ}, Q_PROJ),
    "names_the_wrong_file": (lambda m: {**m, Q_PROJ: "model-00009-of-00002.safetensors"}, Q_PROJ),
    "is_no_table": (lambda m: [], names.INDEX),
}


@pytest.mark.parametrize("case", INDEX_CASES)
def test_an_index_that_disagrees_with_its_shards_is_refused(case: str, tmp_path: Path) -> None:
    change, field = INDEX_CASES[case]
    assert only_fault(examine(publish_with_index(change, tmp_path), source=Source.CALLER)) == (
        "snapshot_invalid",
        field,
    )


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    base = lay_out(tiny(), tmp_path / "models" / "base", shards=2)
    assert only_fault(examine(base, source=Source.CALLER)) == ("snapshot_invalid", names.INDEX)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    base = lay_out(tiny(), tmp_path / "models" / "base")
    (base / "consolidated.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    report = examine(base, source=Source.CALLER)
    assert "is in both consolidated.safetensors and model.safetensors" in doctor.render(report)


# --- where it lies


def test_a_snapshot_outside_the_roots_is_unsafe_even_if_it_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SnapshotUnsafe, match="outside the allowed roots") as caught:
        admit(tmp_path / "elsewhere", source=Source.STAGING, roots=[tmp_path / "root"])
    assert caught.value.field == "snapshot"
    assert "fleet.toml" in (caught.value.hint or "")


@pytest.mark.parametrize("path", ["{root}/r1/../../elsewhere", "relative/step_4-00000000", "{root}/a\0b"])
def test_a_path_that_leads_out_or_can_not_be_one_is_unsafe(path: str, tmp_path: Path) -> None:
    with pytest.raises(SnapshotUnsafe):
        admit(Path(path.format(root=tmp_path / "root")), source=Source.STAGING, roots=[tmp_path / "root"])


def test_a_directory_that_is_a_link_out_of_the_root_is_unsafe(tmp_path: Path) -> None:
    outside = publish(tiny(), tmp_path / "outside").path
    (tmp_path / "root" / "r1").mkdir(parents=True)
    link = tmp_path / "root" / "r1" / outside.name
    link.symlink_to(outside)
    with pytest.raises(SnapshotUnsafe):
        admit(link, source=Source.STAGING, roots=[tmp_path / "root"])


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(SnapshotFault):
        admit(tmp_path / "a", source=Source.STAGING, roots=[tmp_path])


def test_no_directory_is_ckpt_missing_for_every_source(tmp_path: Path) -> None:
    for source in Source:
        with pytest.raises(SnapshotMissing):
            admit(tmp_path / "gone", source=source, roots=[tmp_path])


def test_a_file_in_place_of_the_directory_is_ckpt_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotMissing, match="is no directory"):
        admit(tmp_path / "file", source=Source.CALLER, roots=[tmp_path])


def test_an_own_save_hf_without_its_marker_is_ckpt_missing(tmp_path: Path) -> None:
    own = lay_out(tiny(), tmp_path / "ckpt" / "step_4")
    with pytest.raises(SnapshotMissing) as caught:
        admit(own, source=Source.REUSE, roots=[tmp_path])
    assert caught.value.code == "ckpt_missing"


# --- whose it is


def test_a_snapshot_of_another_digest_run_or_step_than_asked_for_is_refused(published: Path) -> None:
    assert only_fault(examine(published, expect_digest="0" * 32)) == ("snapshot_invalid", "digest")
    assert only_fault(examine(published, run="other")) == ("snapshot_invalid", "run")
    assert only_fault(examine(published, step=5)) == ("snapshot_invalid", "step")


def test_a_renamed_snapshot_is_refused(published: Path) -> None:
    renamed = published.rename(published.with_name("step_9-" + published.name[-8:]))
    assert only_fault(examine(renamed)) == ("snapshot_invalid", "snapshot")


def test_a_canary_with_a_token_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = publish(tiny(), tmp_path / "root").path
    table = json.loads((path / names.MANIFEST).read_text())
    table["canary"]["token_ids"][0][0] = 32  # it would kill the engine
    (path / names.MANIFEST).write_text(json.dumps(table))
    assert only_fault(examine(path)) == ("snapshot_invalid", "canary")


# --- what is never opened, and how much is read


def test_pickles_alone_are_refused_with_the_way_out(tmp_path: Path) -> None:
    base = lay_out(tiny(), tmp_path / "models" / "base")
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(b"\x80\x04")
    report = examine(base, source=Source.CALLER)
    assert only_fault(report) == ("snapshot_invalid", "snapshot")
    assert "never opened" in (report.faults[0].hint or "")


def test_the_first_fault_is_raised_and_says_how_many_more_there_are(tmp_path: Path) -> None:
    model = tiny()
    drop_tensor(model)
    put = model.tensors["model.norm.weight"]
    model.tensors["model.norm.weight"] = replace(put, shape=(8,), data=np.zeros(8, "<f4"))
    with pytest.raises(SnapshotFault, match=r"the tensor is missing.*and 1 more") as caught:
        admit(publish(model, tmp_path).path, source=Source.STAGING, roots=[tmp_path])
    assert caught.value.field == Q_PROJ


def test_a_cheap_fault_saves_reading_the_bytes(tmp_path: Path, published: Path) -> None:
    a_bit_flipped(published)
    (published / names.COMPLETE).unlink()
    assert [fault.code for fault in examine(published).faults] == [FaultCode.MISSING]
    assert len(doctor.examine(published).faults) > 1


def test_a_zero_dimensional_or_unknown_dtype_tensor_is_named(tmp_path: Path) -> None:
    model = tiny()
    model.tensors[Q_PROJ] = TensorData(Q_PROJ, "I64", (), np.array(7, "<i8"))
    fields = [fault.field for fault in examine(publish(model, tmp_path).path).faults]
    assert fields == [Q_PROJ, Q_PROJ]  # its shape and its dtype
