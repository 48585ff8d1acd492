"""The demo deletes nothing but what a demo wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_service.contract.errors import ConfigError
from eval_service.demo.workspace import MARKER, fresh


def test_a_new_directory_is_made_and_marked(tmp_path: Path) -> None:
    with fresh(tmp_path / "a" / "out") as workspace:
        assert (workspace.out / MARKER).is_file()
        assert workspace.out == tmp_path / "a" / "out"


def test_a_former_demos_output_is_replaced(tmp_path: Path) -> None:
    with fresh(tmp_path / "out") as workspace:
        workspace.model.mkdir()
        (workspace.out / "report.json").write_text("{}")
    with fresh(tmp_path / "out") as workspace:
        assert sorted(path.name for path in workspace.out.iterdir()) == [MARKER, "logs"]


def test_a_strangers_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds files that no demo wrote"), fresh(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="not a directory"), fresh(tmp_path / "out"):
        pass


def test_what_a_link_in_the_output_points_to_is_kept(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("")
    with fresh(tmp_path / "out") as workspace:
        (workspace.out / "link").symlink_to(tmp_path / "elsewhere")
    with fresh(tmp_path / "out") as workspace:
        assert not (workspace.out / "link").exists()
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_two_demos_do_not_share_a_directory(tmp_path: Path) -> None:
    with fresh(tmp_path / "out"):
        with pytest.raises(ConfigError, match="another demo"), fresh(tmp_path / "out"):
            pass


def test_half_written_directories_and_kept_snapshots_are_told_apart(tmp_path: Path) -> None:
    with fresh(tmp_path / "out") as workspace:
        run = workspace.snapshots / "demo"
        for name in (".partial-0123456789abcdef", "step_100-0123abcd", "step_50-0123abcd", "evals", "outbox"):
            (run / name).mkdir(parents=True)
        assert workspace.partial() == [str(run / ".partial-0123456789abcdef")]
        assert workspace.kept("demo") == ["step_50-0123abcd", "step_100-0123abcd"]
