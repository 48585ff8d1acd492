"""Hard links hold what is not ours: all that an engine may read, nothing that leads out, and nothing twice."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from eval_service.admission.links import Linked, hold
from eval_service.contract.wire import Source
from tests.support.tiny_snapshots import lay_out, publish, tiny


def test_everything_but_pickles_is_linked_and_what_comes_later_is_added(tmp_path: Path) -> None:
    theirs, links = lay_out(tiny(), tmp_path / "theirs"), tmp_path / "root" / "r1" / ".held-x"
    late = (theirs / "config.json").rename(tmp_path / "late")
    (theirs / "optimizer.pt").write_bytes(b"large")
    assert hold(theirs, links, source=Source.CALLER, roots=[tmp_path]) == Linked(links)
    late.rename(theirs / "config.json")
    (theirs / "model.safetensors").unlink()
    assert hold(theirs, links, source=Source.CALLER, roots=[tmp_path]) == Linked(links)
    wanted = {path.name for path in theirs.iterdir()} - {"optimizer.pt"} | {"model.safetensors"}
    assert {path.name for path in links.iterdir()} == wanted


def test_a_file_that_took_anothers_name_is_linked_anew(tmp_path: Path) -> None:
    theirs, links = lay_out(tiny(), tmp_path / "theirs"), tmp_path / ".held-x"
    hold(theirs, links, source=Source.CALLER, roots=[tmp_path])
    (theirs / "config.json").unlink()
    (theirs / "config.json").write_text("{}")
    hold(theirs, links, source=Source.CALLER, roots=[tmp_path])
    assert (links / "config.json").read_text() == "{}"


def test_nothing_is_linked_that_leads_out_and_a_models_own_links_are_followed(tmp_path: Path) -> None:
    root, links = tmp_path / "root", tmp_path / "root" / ".held-x"
    theirs = lay_out(tiny(), root / "theirs")
    inside = (theirs / "model.safetensors").rename(root / "blob")
    (theirs / "model.safetensors").symlink_to(inside)
    assert hold(theirs, links, source=Source.CALLER, roots=[root]) == Linked(links)
    assert (links / "model.safetensors").samefile(inside)
    assert not (links / "model.safetensors").is_symlink()
    (tmp_path / "secret").write_text("s")
    other = lay_out(tiny(), root / "other")
    (other / "vocab.json").symlink_to(tmp_path / "secret")
    never = root / ".held-y"
    assert hold(other, never, source=Source.CALLER, roots=[root]) == Linked(other)
    assert hold(tmp_path / "outside", never, source=Source.CALLER, roots=[root]) == Linked(tmp_path / "outside")
    assert not never.exists()


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_said(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = publish(tiny(), tmp_path).path

    def refused(*_: object) -> None:
        raise OSError(code, "not here")

    monkeypatch.setattr("eval_service.admission.links.os.link", refused)
    found = hold(path, tmp_path / ".held-x", source=Source.REUSE, roots=[tmp_path])
    assert found.directory == path
    assert "not here" in (found.why_not or "")
