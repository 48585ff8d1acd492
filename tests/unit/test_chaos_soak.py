"""What the soak asks of the service beside its trainers."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval_service.chaos import soak
from eval_service.contract.errors import Unavailable


class Client:
    """Away for the first request; then it takes two dispatches, and that is all that is wanted."""

    def __init__(self) -> None:
        self.enough = threading.Event()
        self.asked: list[str] = []

    def put_run(self, run: str, spec: object) -> None:
        del spec
        self.asked.append(f"put {run}")
        if len(self.asked) == 1:
            raise Unavailable("nobody listens yet")

    def dispatch(self, request: Any) -> Any:
        self.asked.append(f"dispatch {request.step}")
        if request.step == 1:
            self.enough.set()
        return SimpleNamespace(points=[SimpleNamespace(id=str(request.step))])


def test_a_service_that_is_away_for_a_moment_does_not_end_the_judged_run_for_the_rest_of_the_soak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(soak, "_JUDGED_S", 0.001)
    client = Client()
    fleet: Any = SimpleNamespace(world=SimpleNamespace(root=Path("/runs"), model=Path("/model")), client=client)
    restless = soak.Restless(fleet, 1, lambda line: None, _ending=client.enough)
    asking = threading.Thread(target=restless._judge, daemon=True)
    asking.start()
    asking.join(30)
    assert client.asked == ["put judged", "put judged", "dispatch 0", "dispatch 1"]
    assert restless.judged == ["0", "1"]
    assert len(restless.failures) == 1, "and it is told"
