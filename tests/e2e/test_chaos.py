"""`evalfleet chaos` on the real application: it loses nothing, and it notices when a safeguard is switched off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval_service.chaos.faults import FaultKind

pytestmark = [pytest.mark.real, pytest.mark.destructive, pytest.mark.timeout(960)]


def _chaos(tmp_path: Path, *arguments: str, disable: str = "") -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "eval_service.cli.main", "chaos", "--json", "--out", str(tmp_path / "chaos")]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "EVALFLEET_CHAOS_DISABLE": disable},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def _broken(document: dict[str, Any]) -> list[str]:
    return [f"{one['name']}: {one['broken'][:3]}" for one in document["promises"] if not one["ok"]]


def test_forty_faults_lose_nothing_and_every_one_of_them_landed(tmp_path: Path) -> None:
    code, document = _chaos(tmp_path, "--seed", "7", "--faults", "40")
    assert _broken(document) == []
    assert code == 0
    assert sum(document["landed"].values()) == 40
    assert set(document["landed"]) == set(FaultKind) - {FaultKind.KILL_SERVICE}
    assert any(state.startswith("done") for state in document["points"])
    assert list((tmp_path / "chaos" / "logs").glob("session_*/raylet.out")), "to see why, where a run fails"


def test_with_the_epoch_check_or_the_scan_switched_off_the_same_command_fails(tmp_path: Path) -> None:
    """Both in one run: what misses the one promise can't miss the other."""
    kinds = ",".join((FaultKind.LOSE_LOCK, FaultKind.KILL_TRAINER_UNSENT))
    code, document = _chaos(tmp_path, "--faults", "2", "--kinds", kinds, "--engines", "1", disable="epoch,scan")
    assert code == 1
    broken = {one["name"] for one in document["promises"] if not one["ok"]}
    assert broken >= {"one controller acts", "no point is lost"}
