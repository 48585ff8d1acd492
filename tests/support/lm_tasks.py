"""lm-eval tasks of our own, over local files: one generates, one compares choices."""

from __future__ import annotations

import json
from pathlib import Path

SUITE = """
[suites.harness]
kind = "lm_eval"
path = "lm_tasks"
tasks = ["tiny_generate", "tiny_choose"]
metric = "tiny_choose/acc"
"""
DOCUMENTS = 12
_WORDS = ("cab", "bead", "deaf", "face", "fed", "ace", "dab", "bee", "fade", "cafe", "decaf", "abed")

_COMMON = """
dataset_path: json
dataset_kwargs: {{ data_files: {{ test: {data} }} }}
test_split: test
metadata: {{ version: 1 }}
"""
_GENERATE = (
    """task: tiny_generate
output_type: generate_until
doc_to_text: "sort: {{{{word}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{ until: ["c"], max_gen_toks: 8, do_sample: false }}
metric_list: [{{ metric: exact_match, aggregation: mean, higher_is_better: true }}]
"""
    + _COMMON
)
_CHOOSE = (
    """task: tiny_choose
output_type: multiple_choice
doc_to_text: "sort: {{{{word}}}} ="
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{ metric: acc, aggregation: mean, higher_is_better: true }}]
"""
    + _COMMON
)


def write(directory: Path) -> None:
    """The tasks and their data."""
    directory.mkdir(parents=True)
    rows = [
        {
            "word": word,
            "answer": "".join(sorted(word)),
            "choices": ["".join(sorted(word)), word[::-1], word],
            "label": 0,
        }
        for word in _WORDS[:DOCUMENTS]
    ]
    data = directory / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    (directory / "generate.yaml").write_text(_GENERATE.format(data=data))
    (directory / "choose.yaml").write_text(_CHOOSE.format(data=data))
