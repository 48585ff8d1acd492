"""The table of expected tensors is that of the real architectures, and real exporters' files are admitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval_service.admission.architectures import FAMILIES, HfConfig, expected_shapes
from eval_service.admission.checks import admit
from eval_service.contract.wire import Source
from tests.support.tiny_snapshots import tiny, tiny_config

CHANGES: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": False},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"num_key_value_heads": 4, "head_dim": 4},
]


@pytest.mark.real
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_expected_tensors_are_those_of_transformers(architecture: str, changes: dict[str, Any]) -> None:
    import torch
    import transformers

    table = tiny_config(architecture, **changes)
    table.pop("architectures")
    config = transformers.AutoConfig.for_model(**table)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    real = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        real.pop("lm_head.weight", None)
    written = HfConfig.model_validate({**config.to_dict(), "architectures": [architecture]})
    assert expected_shapes(written) == real


@pytest.mark.real
@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("shard", ["1GB", "8KB"])
def test_what_save_pretrained_writes_is_admitted(architecture: str, shard: str, tmp_path: Path) -> None:
    import torch
    import transformers

    table = tiny_config(architecture)
    table.pop("architectures")
    config = transformers.AutoConfig.for_model(**table)
    model = getattr(transformers, architecture)(config).to(torch.bfloat16)
    base = tmp_path / "base"
    model.save_pretrained(base, max_shard_size=shard)
    for name, data in tiny().texts.items():
        if name.startswith("tokenizer"):
            (base / name).write_bytes(data)
    admitted = admit(base, source=Source.CALLER, roots=[tmp_path])
    assert admitted.described
    assert admitted.facts.dtype == "BF16"
    shards = {entry.file for entry in admitted.manifest.tensors}
    assert (len(shards) == 1) == (shard == "1GB")
