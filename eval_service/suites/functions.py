"""The user's scorers, imported once when suites are loaded: in a process, since importing runs what they hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from eval_service.contract.errors import ConfigError
from eval_service.secrets_apart import without_secrets

_TIMEOUT_S = 60.0


def check_functions(functions: Mapping[str, str], base: Path) -> dict[str, str]:
    """Import each suite's `module:function`; the digests of their modules' texts, by suite.

    Raises:
        ConfigError: one can't be imported; names its key.
    """
    if not functions:
        return {}
    asked = json.dumps([{"function": function, "directory": str(base)} for function in functions.values()])
    path = os.pathsep.join(entry for entry in sys.path if entry)
    first = f"suites.{next(iter(functions))}.scorer.function"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "eval_service.suites.scorer_worker", "--check"],
            input=asked,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            start_new_session=True,
            env={**without_secrets(os.environ), "PYTHONPATH": path},
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(f"importing it took more than {_TIMEOUT_S:g} s", field=first) from exc
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"importing it ended the process ({done.returncode}): {last[:300]}", field=first)
    found = json.loads(done.stdout.splitlines()[-1])
    for name, told in zip(functions, found, strict=True):
        if "error" in told:
            key = f"suites.{name}.scorer.function"
            hint = "its module lies beside the suites file, or is installed"
            raise ConfigError(f"it can't be imported: {told['error']}", field=key, hint=hint)
    return {name: told["digest"] for name, told in zip(functions, found, strict=True)}
