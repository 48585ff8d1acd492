"""What is sound is admitted, whoever wrote it, and read once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval_service.admission import checks, content, doctor
from eval_service.admission.architectures import FAMILIES
from eval_service.admission.checks import admit, find_faults
from eval_service.contract import names, safetensors_io
from eval_service.contract.snapshot import describe_directory
from eval_service.contract.wire import Source
from tests.support.tiny_snapshots import lay_out, publish, tensor, tiny


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_sound_export_is_admitted(architecture: str, dtype: str, tied: bool, tmp_path: Path) -> None:
    published = publish(tiny(architecture, dtype=dtype, tie_word_embeddings=tied), tmp_path, shards=3)
    admitted = admit(
        published.path,
        source=Source.STAGING,
        roots=[tmp_path],
        expect_digest=published.manifest.digest,
        run="r1",
        step=4,
    )
    assert admitted.manifest == published.manifest
    assert (admitted.facts.vocab_size, admitted.facts.eos_token_ids) == (32, (1,))
    assert not admitted.described


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"attention_bias": True, "mlp_bias": True}])
def test_biases_are_expected_where_the_config_says_so(changes: dict[str, bool], tmp_path: Path) -> None:
    admit(publish(tiny("LlamaForCausalLM", **changes), tmp_path).path, source=Source.STAGING, roots=[tmp_path])


def test_a_callers_directory_gets_the_manifest_that_the_contract_would_describe(tmp_path: Path) -> None:
    base = lay_out(tiny(), tmp_path / "base")
    (base / "optimizer.pt").write_bytes(b"\x80")
    (base / ".cache").mkdir()
    before = sorted(base.iterdir())
    admitted = admit(base, source=Source.CALLER, roots=[tmp_path])
    assert admitted.described
    assert admitted.manifest.digest == describe_directory(base, run="x", step=0).digest
    assert "optimizer.pt" not in {entry.name for entry in admitted.manifest.files}
    assert sorted(base.iterdir()) == before, "nothing is written into a caller's directory"


def test_pickles_beside_safetensors_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = lay_out(tiny(), tmp_path / "base")
    for name in ("pytorch_model.bin", "optimizer.pt", "scheduler.pkl"):
        (base / name).write_bytes(b"\x80\x04")
    opened: list[str] = []

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def opens(path: Any, *args: Any, **kwargs: Any) -> Any:
            opened.append(Path(path).name)
            return real(path, *args, **kwargs)

        return opens

    monkeypatch.setattr(Path, "open", watched(Path.open))
    monkeypatch.setattr(os, "open", watched(os.open))
    admit(base, source=Source.CALLER, roots=[tmp_path])
    assert "model.safetensors" in opened
    assert not {"pytorch_model.bin", "optimizer.pt", "scheduler.pkl"} & set(opened)


def test_a_published_snapshot_may_be_another_runs_base_model_with_its_manifest(tmp_path: Path) -> None:
    published = publish(tiny(), tmp_path)
    admitted = admit(published.path, source=Source.CALLER, roots=[tmp_path], run="another", step=0)
    assert admitted.manifest == published.manifest


def test_a_callers_own_manifest_json_is_not_taken_for_ours(tmp_path: Path) -> None:
    base = lay_out(tiny(), tmp_path / "base")
    (base / names.MANIFEST).write_text('{"theirs": 1}')
    assert admit(base, source=Source.CALLER, roots=[tmp_path]).described


def test_a_callers_links_may_stay_inside_the_root_as_in_a_download_cache(tmp_path: Path) -> None:
    base = lay_out(tiny(), tmp_path / "cache" / "snapshots" / "rev")
    blob = tmp_path / "cache" / "blobs" / "abc"
    blob.parent.mkdir()
    (base / "model.safetensors").rename(blob)
    (base / "model.safetensors").symlink_to("../../blobs/abc")
    assert admit(base, source=Source.CALLER, roots=[tmp_path / "cache"]).described
    assert not find_faults(base, source=Source.CALLER).ok, "with no root known, no link may leave the directory"


def test_a_root_may_itself_be_reached_through_a_link(tmp_path: Path) -> None:
    published = publish(tiny(), tmp_path / "disk")
    (tmp_path / "alias").symlink_to(tmp_path / "disk")
    through = tmp_path / "alias" / "r1" / published.path.name
    assert admit(through, source=Source.STAGING, roots=[tmp_path / "alias"]).directory == published.path.resolve()


def test_a_tied_head_that_repeats_the_embedding_is_allowed(tmp_path: Path) -> None:
    model = tiny()
    embedding = model.tensors["model.embed_tokens.weight"]
    copy = tensor("lm_head.weight", embedding.shape)
    copy.data[...] = embedding.data
    model.tensors["lm_head.weight"] = copy
    admit(publish(model, tmp_path).path, source=Source.STAGING, roots=[tmp_path])


def test_auto_map_is_allowed_where_the_service_says_so(tmp_path: Path) -> None:
    model = tiny(auto_map={"AutoModelForCausalLM": "modeling.Own"})
    admit(publish(model, tmp_path).path, source=Source.STAGING, roots=[tmp_path], allow_auto_map=True)


def test_a_reused_checkpoint_of_a_forked_run_is_admitted_at_its_step(tmp_path: Path) -> None:
    published = publish(tiny(), tmp_path, run="parent", step=7)
    admit(published.path, source=Source.REUSE, roots=[tmp_path], run="fork", step=7)


def test_the_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = publish(tiny(), tmp_path, shards=2)
    read: list[int] = []
    real = safetensors_io._read_chunks

    def counting(file: object, size: int) -> object:
        for chunk in real(file, size):  # type: ignore[arg-type]
            read.append(len(chunk))
            yield chunk

    monkeypatch.setattr(safetensors_io, "_read_chunks", counting)
    admit(published.path, source=Source.STAGING, roots=[tmp_path])
    headers = sum(entry.size_bytes for entry in published.manifest.files)
    assert 0.8 * headers < sum(read) <= headers


def test_a_file_is_looked_at_in_chunks_of_whole_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_io, "_CHUNK_BYTES", 64)
    model = tiny()
    model.tensors["model.norm.weight"].data[-1] = float("nan")
    report = find_faults(publish(model, tmp_path).path, source=Source.STAGING)
    assert [fault.field for fault in report.faults] == ["model.norm.weight"]


def test_a_bad_snapshots_manifest_is_still_reported_so_that_gc_can_know_it(tmp_path: Path) -> None:
    model = tiny()
    model.tensors["model.norm.weight"].data[0] = float("nan")
    published = publish(model, tmp_path)
    report = find_faults(published.path, source=Source.STAGING, roots=[tmp_path])
    assert not report.ok
    assert report.manifest is not None
    assert report.manifest.nonce == published.manifest.nonce


def test_counting_what_is_not_finite_leaves_integers_alone() -> None:
    assert content.count_not_finite("I64", b"\xff" * 64) == 0
    assert content.count_not_finite("BF16", b"\xff\xff" * 3) == 3


# --- the doctor


def test_the_doctor_calls_a_sound_snapshot_sound(tmp_path: Path) -> None:
    report = doctor.examine(publish(tiny(), tmp_path).path)
    assert doctor.exit_code(report) == 0
    assert "sound; Qwen3ForCausalLM" in doctor.render(report)
    table = json.loads(json.dumps(doctor.as_json(report)))
    assert (table["ok"], table["manifest"], table["faults"]) == (True, "read", [])


def test_the_doctor_shows_every_fault_at_once_with_the_fix(tmp_path: Path) -> None:
    model = tiny()
    del model.tensors["model.norm.weight"]
    model.tensors["model.layers.0.mlp.up_proj.weight"].data[0, 0] = float("inf")
    del model.texts["tokenizer_config.json"]
    model.texts["generation_config.json"] = b'{"eos_token_id": [99]}'
    path = publish(model, tmp_path).path
    (path / names.COMPLETE).unlink()
    report = doctor.examine(path)
    text = doctor.render(report)
    for field in (
        names.COMPLETE,
        "model.norm.weight",
        "model.layers.0.mlp.up_proj.weight",
        "tokenizer_config.json",
        "eos_token_id",
    ):
        assert field in text
    assert len(doctor.as_json(report)["faults"]) == 5
    assert text.count("->") >= 4


def test_the_doctor_takes_a_directory_without_our_files_for_a_callers(tmp_path: Path) -> None:
    assert doctor.guess_source(lay_out(tiny(), tmp_path / "base")) is Source.CALLER
    assert doctor.guess_source(tmp_path / "step_4-0123abcd") is Source.STAGING
    assert checks.find_faults(tmp_path / "nowhere", source=Source.CALLER).faults[0].code == "ckpt_missing"
