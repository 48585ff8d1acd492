"""Runs the command line in this process, as the shell would."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from eval_service.cli import options
from eval_service.cli.main import main
from tests.support.fake_service import FakeService


@dataclass(frozen=True)
class Ran:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


@dataclass
class Command:
    """`evalfleet` against a service in memory."""

    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    service: FakeService

    def __call__(self, *arguments: str) -> Ran:
        self.patch.setattr(sys, "argv", ["evalfleet", *arguments])
        self.patch.setattr(options, "connect", self.service.connect)
        with pytest.raises(SystemExit) as ended:
            main()
        captured = self.capsys.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)
