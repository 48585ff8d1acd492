"""Samples on disk: all of what was written or nothing, and a page at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eval_service.contract.errors import NotFound
from eval_service.contract.wire import SampleView
from eval_service.suites import samples as module
from eval_service.suites.samples import SCHEMA, Which, read_samples, write_samples


def _sample(index: int) -> SampleView:
    errored, wrong = index % 5 == 0, index % 5 == 1
    return SampleView(
        index=index,
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
    page = read_samples(file, offset=offset, limit=limit, which=which)
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
