"""Samples on disk: all of what was written or nothing, and a page at a time."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval_service.contract.errors import NotFound
from eval_service.contract.wire import SampleView
from eval_service.suites import samples as module
from eval_service.suites.samples import SCHEMA, Wanted, Which, read_samples, write_samples
from tests.support.views import sample


def _sample(index: int) -> SampleView:
    errored, wrong = index % 5 == 0, index % 5 == 1
    return SampleView(
        index=index,
        prompt_index=index,
        dataset="d",
        prompt="好 \x00 p",
        answer="a",
        output="" if errored else "a",
        score=None if errored else float(not wrong),
        error="too long" if errored else None,
        finish_reason=None if errored else "stop",
        prompt_tokens=3,
        output_tokens=1,
        engine="e",
        weight_version="abc.1",
        latency_s=0.25,
    )


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_ROW_GROUP", 7)
    path = tmp_path / "evals" / "step_0-s-1.parquet"
    assert write_samples(path, (_sample(i) for i in range(50))) == 50
    return path


def test_the_schema_has_the_wire_types_fields_in_their_order() -> None:
    assert SCHEMA.names == list(SampleView.model_fields)


def test_what_was_written_is_read_back(file: Path) -> None:
    page = read_samples(file, limit=1000)
    assert page.samples == tuple(_sample(i) for i in range(50))
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("which", "matching"),
    [
        (Which.ALL, list(range(50))),
        (Which.WRONG, list(range(1, 50, 5))),
        (Which.ERRORED, list(range(0, 50, 5))),
    ],
)
@pytest.mark.parametrize(("offset", "limit"), [(0, 4), (6, 3), (8, 100), (100, 5), (0, 0)])
def test_a_page_of_those_that_match(file: Path, which: Which, matching: list[int], offset: int, limit: int) -> None:
    page = read_samples(file, offset=offset, limit=limit, wanted=Wanted.of([which]))
    assert [sample.index for sample in page.samples] == matching[offset : offset + limit]
    assert page.total == len(matching)


def test_a_write_that_fails_leaves_what_was_there(file: Path) -> None:
    def broken() -> Iterator[SampleView]:
        yield from (_sample(i) for i in range(20))
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_samples(file, broken())
    assert read_samples(file).total == 50
    assert len(list(file.parent.iterdir())) == 1


def test_no_samples_and_no_file(tmp_path: Path) -> None:
    assert write_samples(tmp_path / "none.parquet", []) == 0
    assert read_samples(tmp_path / "none.parquet").total == 0
    with pytest.raises(NotFound):
        read_samples(tmp_path / "gone.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "none.parquet").read_bytes()[:-5])
    with pytest.raises(NotFound, match="no file of samples"):
        read_samples(tmp_path / "cut.parquet")


# --- looking for samples


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of 40: each tenth of a kind, the others right."""
    monkeypatch.setattr(module, "_ROW_GROUP", 6)
    changes: list[dict[str, Any]] = [
        {"finish_reason": "length", "score": 0.0, "output": "and so on"},
        {"output": " \n", "score": 0.0},
        {"unparsed": True, "score": 0.0, "output": "Forty-two"},
        {"score": 0.5},
        {"score": None, "error": "too LONG", "output": "", "finish_reason": None},
        *({"score": 1.0} for _ in range(5)),
    ]
    path = tmp_path / "mixed.parquet"
    write_samples(path, (sample(i, **changes[i % 10]) for i in range(40)))
    return path


def _found(path: Path, *kinds: Which, text: str | None = None) -> set[int]:
    page = read_samples(path, limit=1000, wanted=Wanted.of(kinds, text))
    assert page.total == len(page.samples)
    return {sample.index % 10 for sample in page.samples}


def test_every_kind_of_sample_is_found_and_of_several_those_of_any(mixed: Path) -> None:
    assert _found(mixed, Which.TRUNCATED) == {0}
    assert _found(mixed, Which.EMPTY) == {1}, "one that errored was never answered"
    assert _found(mixed, Which.UNPARSED) == {2}
    assert _found(mixed, Which.WRONG) == {0, 1, 2, 3}
    assert _found(mixed, Which.ERRORED, Which.TRUNCATED) == {0, 4}
    assert _found(mixed, Which.ERRORED, Which.ALL) == set(range(10))


def test_a_text_is_found_in_output_and_error_whatever_its_case_and_within_the_kinds(mixed: Path) -> None:
    assert _found(mixed, text="forty-TWO") == {2}
    assert _found(mixed, text="too long") == {4}
    assert _found(mixed, text="sort 1") == {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, "of the prompts"
    assert _found(mixed, Which.WRONG, text="too long") == set()
    assert _found(mixed, text="nowhere") == set()


def test_looking_for_what_is_not_there_reads_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of the row groups tell; of 100,000 samples that are all right a filter costs next to nothing."""
    path = tmp_path / "right.parquet"
    write_samples(path, (sample(i) for i in range(5000)))
    monkeypatch.setattr(module, "_of_kind", lambda *_: pytest.fail("rows were read"))
    assert read_samples(path, wanted=Wanted.of([Which.WRONG])).total == 0
    assert read_samples(path, wanted=Wanted.of([Which.ERRORED])).total == 0


def test_a_page_reads_only_the_row_groups_that_it_lies_in(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = pq.ParquetFile.read_row_group

    def noted(self: Any, group: int, **rest: Any) -> Any:
        read.append(group)
        return real(self, group, **rest)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    assert [found.index for found in read_samples(file, offset=20, limit=3).samples] == [20, 21, 22]
    assert read == [2, 3]


# --- files of the version before, and other people's readers


def test_a_file_of_the_version_before_is_read_with_one_sample_a_prompt(tmp_path: Path) -> None:
    later = {"prompt_index", "sample_index", "seed", "unparsed"}
    older = pa.schema([field for field in SCHEMA if field.name not in later])
    rows = [{name: value for name, value in _sample(i).model_dump().items() if name not in later} for i in range(9)]
    path = tmp_path / "older.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=older), path)
    assert read_samples(path).samples == tuple(_sample(i) for i in range(9))
    assert read_samples(path, wanted=Wanted.of([Which.UNPARSED])).total == 0
    assert read_samples(path, wanted=Wanted.of([Which.WRONG])).total == 2


@pytest.mark.parametrize("reader", ["pandas", "duckdb"])
def test_the_line_in_the_docs_reads_samples(file: Path, reader: str) -> None:
    """`docs/statistics.md` shows one line for each; here it runs on a file that the service wrote."""
    docs = (Path(__file__).parents[2] / "docs/statistics.md").read_text()
    (line,) = re.findall(rf"^wrong = {reader}\..+$", docs, re.MULTILINE)
    found: dict[str, Any] = {reader: importlib.import_module(reader)}
    exec(line.replace("RUN_DIR/evals", str(file.parent)), found)
    wrong = found["wrong"]
    assert list(wrong["index"]) == list(range(1, 50, 5))
    assert wrong["prompt"][0] == "好 \x00 p"


@pytest.mark.parametrize("linked", ["run", "run/evals"])
def test_a_link_in_the_runs_directory_leads_no_sample_out_of_it(linked: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "evals").mkdir(parents=True)
    place = tmp_path / "root" / linked
    place.parent.mkdir(parents=True)
    place.symlink_to(outside)
    with pytest.raises(OSError, match="is a link"):
        write_samples(tmp_path / "root" / "run" / "evals" / "x.parquet", [_sample(1)])
    assert [path.name for path in outside.rglob("*")] == ["evals"]


def test_files_of_former_attempts_go_with_the_new_one_and_one_that_can_not_be_removed_costs_nothing(
    tmp_path: Path,
) -> None:
    left, odd, path = (tmp_path / "evals" / f"step_0-s-p-{attempt}.parquet" for attempt in (1, 2, 3))
    write_samples(left, [_sample(1)])
    odd.mkdir()
    assert write_samples(path, [_sample(2)], former=[left, odd, tmp_path / "evals" / "none"]) == 1
    assert sorted(path.parent.iterdir()) == [odd, path]
